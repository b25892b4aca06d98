"""The core of Tokenyard: what a cluster is, what a policy may see, and what it decides.

Reading order: `problem` (what the three problems have in common), `evaluation` (how policies are
compared), `types` (what everything speaks), `scenario` (what is fixed in an experiment),
`workload` (where requests come from), `sim.cluster` (the simulator), `observation` (snapshots
to numbers), `policies` (who decides), `artifact` (how a trained policy travels).
"""
