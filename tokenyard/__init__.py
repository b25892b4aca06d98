"""The core of Tokenyard: what a cluster is, what a policy may see, and what it decides.

Three problems: routing (which replica serves a request), `allocation` (which parallelism plan runs
on how many GPUs) and `regions` (which share of demand goes to which region). Reading order for
routing: `types` (what everything speaks), `scenario` (what is fixed in an experiment), `workload`
(where requests come from), `perf` (how long an iteration takes), `sim` (the simulators),
`observation` (snapshots to numbers), `policies` (who decides), `artifact` (how a trained policy
travels), `rl` (how it is trained), `offpolicy` (what the decision log says of another policy).
"""
