"""Continuous batching as compiled functions that step many independent clusters at once.

docs/engine.md says what a replica does; this package does it without visiting every iteration:
stretches in which nothing but decoding happens are crossed in closed form, since the time of an
iteration is linear in the tokens it holds. `BatchingSim` owns the arrays.

Reading order: `layout` (the arrays), `queue`, `prefix_cache`, `sequences`, `iteration` (one
replica), `lookahead` (the same, played on), `fleet` (replicas, failures, retries), `view` (what a
router sees), `step` (decisions, and whole runs).
"""
