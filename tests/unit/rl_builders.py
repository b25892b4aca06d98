"""Rollouts for tests of the columnar path."""

from __future__ import annotations

import numpy as np

from tokenyard.rl.columnar.columns import Rollout


def a_rollout(rng, num_steps, num_copies, end_probability=0.2, size=2, num_actions=2):
    """Random steps as an environment of autoreset NEXT_STEP makes them."""
    shape = (num_steps, num_copies)
    terminated, truncated, real = (np.zeros(shape, bool) for _ in range(3))
    ended = np.zeros(num_copies, bool)
    for t in range(num_steps):
        real[t] = ~ended
        ends = real[t] & (rng.random(num_copies) < end_probability)
        terminated[t] = ends & (rng.random(num_copies) < 0.5)
        truncated[t] = ends & ~terminated[t]
        ended = ends
    return Rollout(
        observations=rng.normal(size=(num_steps + 1, num_copies, size)).astype(np.float32),
        actions=rng.integers(0, num_actions, shape),
        rewards=np.where(real, rng.normal(size=shape), 0.0).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        real=real,
        action_inputs=rng.normal(size=(*shape, num_actions)).astype(np.float32),
        weights_seq_no=0,
    )


def fragments(rollout, copy):
    """First step and the step after the last one of each stretch of one episode."""
    start = None
    for t in range(len(rollout.actions)):
        if start is None and rollout.real[t, copy]:
            start = t
        last = t + 1 == len(rollout.actions)
        if start is not None and (rollout.terminated | rollout.truncated)[t, copy] | last:
            yield start, t + 1
            start = None
