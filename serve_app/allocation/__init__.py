"""The allocated pool: which plan is in force, and how replicas get there.

Reading order: `transition` (what to start and stop next), `plans` (by name), `allocator` (the
control loop), `replica_sets` (carries it out on Ray Serve).
"""
