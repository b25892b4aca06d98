"""What env runners hand to learners on the columnar path: arrays instead of episode objects.

Shapes: T steps, N copies of the environment, F numbers of an observation, C columns of an action,
I outputs of the network that it is drawn from (`tokenyard.rl.columnar.actions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.types import BoolArray, IntArray

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rollout:
    """The same number of steps of several copies of an environment, step by step.

    It stands where RLlib has a list of episodes, which it is measured like: `len` and `env_steps`
    count what was done in the environment.
    """

    observations: Floats
    """What was decided on, and what was seen last, shape (T + 1, N, F)."""
    actions: IntArray | Floats
    """As `tokenyard.rl.columnar.actions` keeps them: shape (T, N) of choices, else (T, N, C)."""
    rewards: Floats
    """Shape (T, N)."""
    terminated: BoolArray
    """Whether the step ended its episode for good, shape (T, N)."""
    truncated: BoolArray
    """Whether the episode was cut off after the step: its next observation has a value."""
    real: BoolArray
    """False where a step only started the next episode, its action ignored, shape (T, N)."""
    action_inputs: Floats | None
    """What actions were drawn from, shape (T, N, I); None where none were drawn."""
    weights_seq_no: int
    """Which weights decided: the learner's count of updates."""

    def __len__(self) -> int:
        """Steps that were done."""
        return int(np.count_nonzero(self.real))

    def env_steps(self) -> int:
        """Steps that were done, under RLlib's name."""
        return len(self)


@dataclass(frozen=True)
class Transitions:
    """A batch of single steps, drawn from replay."""

    columns: dict[str, npt.NDArray[Any]]
    """By RLlib's names, each of shape (num, ...)."""

    def __len__(self) -> int:
        """Steps in the batch."""
        return len(next(iter(self.columns.values())))

    def env_steps(self) -> int:
        """Steps in the batch, under RLlib's name."""
        return len(self)


def generalised_advantages(
    rollout: Rollout, values: Floats, gamma: float, lambda_: float
) -> Floats:
    """Generalised advantage estimates of every step, one pass back through time for all copies.

    Schulman et al. 2016, arXiv:1506.02438v6, equation (16), cut off at the end of an episode and
    of the rollout, where the value of the last observation stands for what is not seen. With
    `lambda_` 1 the advantage plus the value is the n-step return of A2C.

    Args:
        rollout: T steps of N copies.
        values: Critic's estimate of every observation, shape (T + 1, N).
        gamma: Discount.
        lambda_: Weight of longer returns.

    Returns:
        Shape (T, N); meaningless where a step is not real.
    """
    next_values = np.where(rollout.terminated, np.float32(0.0), values[1:])
    discounted: Floats = np.float32(gamma) * next_values
    errors = rollout.rewards + discounted - values[:-1]
    goes_on = ~(rollout.terminated | rollout.truncated)
    carried = np.float32(gamma * lambda_) * goes_on
    advantages = np.empty_like(errors)
    later = np.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        later = errors[t] + carried[t] * later
        advantages[t] = later
    return advantages


def beyond_others(advantages: Floats, copies_per_stream: int) -> Floats:
    """Advantages of every step beyond the mean of the copies that have the same traffic.

    What the traffic adds to the return is then subtracted, which no critic can predict: the
    input-dependent baseline of Mao et al. 2019, arXiv:1807.02264, estimated from other copies. Its
    own share in the mean shortens an advantage by one part in `copies_per_stream`.

    Args:
        advantages: Shape (T, N).
        copies_per_stream: So many copies in a row have the same traffic; 1: none has.

    Returns:
        Shape (T, N).
    """
    if copies_per_stream == 1:
        return advantages
    grouped = advantages.reshape(len(advantages), -1, copies_per_stream)
    beyond: Floats = (grouped - grouped.mean(-1, keepdims=True)).reshape(advantages.shape)
    return beyond


def minibatches(
    num_rows: int,
    minibatch_size: int | None,
    num_epochs: int,
    rng: np.random.Generator | None = None,
) -> Iterator[IntArray | slice]:
    """Rows of each minibatch, so that every row is met at least `num_epochs` times.

    As RLlib cuts them (`MiniBatchCyclicIterator`): all of one size, the last one of an epoch goes
    on in the next, and the very last is filled up from one epoch more.

    Args:
        num_rows: Rows of the batch.
        minibatch_size: Rows of a minibatch; None: all.
        num_epochs: Passes over the batch.
        rng: Shuffles every epoch anew; None: rows come in their order.
    """
    size = minibatch_size or num_rows
    if size == num_rows and rng is None:
        yield from [slice(0, num_rows)] * num_epochs
        return
    left = np.empty(0, dtype=np.int64)
    for _ in range(-(-num_rows * num_epochs // size)):
        while len(left) < size:
            rows = np.arange(num_rows) if rng is None else rng.permutation(num_rows)
            left = np.concatenate([left, rows])
        yield left[:size]
        left = left[size:]
