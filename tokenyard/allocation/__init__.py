"""Allocation: which parallelism plan serves a model on how much of a pool of GPUs.

Start with `scenario` (what is fixed), `plans` (what can be chosen, and what the performance model
says of each), `dynamics` (what a plan does with the demand of one slot), `demand` (what comes) and
`forecast` (what is expected to come). `planner` chooses plans from forecasts; `policies` are all
that can choose, `tabular` and `own_demand` learn, `artifact` is what leaves training.
"""
