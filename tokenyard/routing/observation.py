"""Snapshots to numbers: one code for training and serving.

A router's view of N replicas is a table of shape (num_replicas, NUM_COLUMNS), one row per
replica, in the units of `ReplicaSnapshot`. `encode` makes the flat observation of a network from
it, and `tokenyard.routing.scores` the costs of policies. All are compiled into the simulator's
kernel and called as they are by the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from tokenyard.compiled import compiled
from tokenyard.routing.types import ReplicaSnapshot, SnapshotColumns
from tokenyard.types import FloatArray

# Columns of the table.
# Of replicas that batch continuously, ITERATION_S to MATCH_TOKENS are as in `EngineSnapshot`; they
# are 0 for those that do not. AGE_S is how old what was scraped is, ROUTABLE whether the replica is
# believed to take requests. The last are where the request would stand among those who wait
# (`policies.places`), 0 where nobody looked: by how many seconds its wait is shorter, and how many
# would start before it and after it.
(
    TOKENS_PER_S, NUM_SLOTS, MAX_CONCURRENCY, NUM_WAITING, NUM_RUNNING, TOKENS_IN_FLIGHT, WAIT_S,
    MEAN_RESPONSE_S, SPEED_RANK, ITERATION_S, PREFILL_TOKEN_S, SEQUENCE_S, KV_TOKEN_S,
    TOKEN_BUDGET, KV_CAPACITY_TOKENS, KV_USED_FRACTION, PREFILL_IN_FLIGHT, OUTPUT_IN_FLIGHT,
    MATCH_TOKENS, AGE_S, ROUTABLE, OVERTAKEN_S, NUM_BEFORE, NUM_BEHIND, NUM_COLUMNS,
) = range(25)  # fmt: skip

RECENT_WEIGHT = 0.1
"""Weight of the newest completion in the exponential mean of response times."""
NUM_REQUEST_FEATURES = 16
NUM_REPLICA_FEATURES = 6
NUM_DELAY_FEATURES = 8
"""Of a replica in the whole observation, after those that the paper's agents see."""

OBSERVATION_LIMIT = 20.0
"""Every observed number lies in [-20, 20]: they are logarithms, so the bound is e^20 units."""

NUM_PLACE_FEATURES = 2
"""The last features of costs: those that are 0 where nobody looked at the queues."""
NUM_MARGINAL_FEATURES = 9 + NUM_PLACE_FEATURES
NUM_SCORE_POWERS = 3
NUM_MARGINAL_WEIGHTS = NUM_MARGINAL_FEATURES * NUM_SCORE_POWERS
NUM_RULE_FEATURES = NUM_MARGINAL_FEATURES + 1
"""What is shown of every replica to those who learn the rule's weights (`encode_rule`)."""
NUM_SLO_PRICES = 2 * NUM_SCORE_POWERS
NUM_SLO_LIMITS = 5
NUM_SLO_WEIGHTS = NUM_SLO_PRICES + NUM_SLO_LIMITS
NUM_MARGINAL_SLO_WEIGHTS = NUM_MARGINAL_WEIGHTS + NUM_SLO_WEIGHTS
"""Length of a marginal policy's weights where it prices SLO violations."""
MARGINAL_WAIT, MARGINAL_PREFILL, MARGINAL_OTHERS = 1, 2, 4
"""Places of the weights, for all replicas alike, of q, t and o of `scores.linear`."""
MARGINAL_OVERTAKEN, MARGINAL_SPARED = 9, 10
"""The same of d and e, which an order takes off q and o."""


def observation_size(num_replicas: int, whole: bool) -> int:
    """Length of an observation of three replicas: 58, or 34 of what the paper's agents see.

    Args:
        num_replicas: Replicas to choose from.
        whole: Whether delays, tokens and memory of each replica are in it.
    """
    per_replica = NUM_REPLICA_FEATURES + (NUM_DELAY_FEATURES if whole else 0)
    return NUM_REQUEST_FEATURES + num_replicas * per_replica


def speed_ranks(tokens_per_s: FloatArray) -> FloatArray:
    """Rank of each replica by speed, from -1 (slowest) to 1 (fastest), shape (num_replicas,).

    Equal speeds are ranked by position, so that even equal replicas can be told apart.
    """
    num = len(tokens_per_s)
    if num == 1:
        return np.zeros(1)
    ranks = np.empty(num)
    ranks[np.argsort(tokens_per_s, kind="stable")] = _evenly_spaced(num)
    return ranks


@lru_cache(maxsize=128)
def _evenly_spaced(num: int) -> FloatArray:
    return np.linspace(-1.0, 1.0, num)


_STATE = attrgetter(
    "tokens_per_s",
    "num_slots",
    "max_concurrency",
    "num_waiting",
    "num_running",
    "tokens_in_flight",
    "predicted_wait_s",
    "mean_response_s",
)
"""Columns TOKENS_PER_S to MEAN_RESPONSE_S."""
_ENGINE = attrgetter(
    "iteration_s",
    "prefill_token_s",
    "sequence_s",
    "kv_token_s",
    "token_budget",
    "kv_capacity_tokens",
    "kv_used_fraction",
    "prefill_in_flight_tokens",
    "output_in_flight_tokens",
    "match_tokens",
)
"""Columns ITERATION_S to MATCH_TOKENS."""


def snapshot_columns(snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
    """Lay snapshots out as the table, shape (num_replicas, NUM_COLUMNS)."""
    columns = unranked_columns(snapshots)
    if isinstance(snapshots, SnapshotColumns):
        columns[:, SPEED_RANK] = snapshots.speed_ranks
        return columns
    # Places of a batch are not slots of a server: there the speed of all of them together counts.
    places = np.where(columns[:, ITERATION_S] > 0.0, columns[:, NUM_SLOTS], 1.0)
    columns[:, SPEED_RANK] = speed_ranks(columns[:, TOKENS_PER_S] * places)
    return columns


def unranked_columns(snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
    """The table of `snapshot_columns` for those who do not look at ranks, which are left 0."""
    if isinstance(snapshots, SnapshotColumns):
        return snapshots.columns
    # This runs at every decision, for every replica: no Python between one number and the next.
    num = len(snapshots)
    columns = np.zeros((num, NUM_COLUMNS))
    states = np.fromiter(chain.from_iterable(map(_STATE, snapshots)), np.float64, num * SPEED_RANK)
    columns[:, :SPEED_RANK] = states.reshape(num, SPEED_RANK)
    engines = [snapshot.engine for snapshot in snapshots]
    known = [engine for engine in engines if engine is not None]
    if known:
        numbers = np.fromiter(chain.from_iterable(map(_ENGINE, known)), np.float64)
        which = slice(None) if len(known) == num else [engine is not None for engine in engines]
        columns[which, ITERATION_S:AGE_S] = numbers.reshape(-1, AGE_S - ITERATION_S)
    columns[:, ROUTABLE] = 1.0
    _fill_waits(columns)
    return columns


def squash(scaled_features: FloatArray) -> FloatArray:
    """Signed logarithm of scaled request features, any shape, bounded by OBSERVATION_LIMIT.

    The bound is out of reach: it stands for a feature e^20 interquartile ranges off its median.
    """
    return np.sign(scaled_features) * np.log1p(np.abs(scaled_features))


@compiled
def recent_mean_s(mean_s: float, response_s: float) -> float:
    """Exponential mean of response times with one more; NaN stands for none before."""
    return response_s if math.isnan(mean_s) else mean_s + RECENT_WEIGHT * (response_s - mean_s)


@compiled
def batching_wait_s(row: FloatArray) -> float:
    """Time until a replica that batches continuously could start on a prompt sent now, seconds.

    The prompts ahead have to be computed. Where the batch or the KV memory is full, sequences
    have to finish first, which they do one after the other as their output runs out.

    Args:
        row: One row of the table, shape (NUM_COLUMNS,).
    """
    outstanding: float = row[NUM_WAITING] + row[NUM_RUNNING]
    if outstanding == 0.0:
        return 0.0
    kv = row[KV_USED_FRACTION] * row[KV_CAPACITY_TOKENS]
    step = row[ITERATION_S] + row[SEQUENCE_S] * row[NUM_RUNNING] + row[KV_TOKEN_S] * kv
    prefill = row[PREFILL_IN_FLIGHT]
    wait: float = prefill * row[PREFILL_TOKEN_S] + prefill / row[TOKEN_BUDGET] * step
    too_many = max(outstanding + 1.0 - row[NUM_SLOTS], row[NUM_WAITING])
    if too_many <= 0.0:
        return wait
    output_left = row[OUTPUT_IN_FLIGHT] / outstanding
    wait += too_many * output_left * step / max(row[NUM_RUNNING], 1.0)
    return wait


@compiled
def batching_delays(
    row: FloatArray, context_tokens: float, output_tokens: float
) -> tuple[float, float, float]:
    """Delays that a request would meet and cause at a replica that batches continuously.

    Its prompt (what the prefix cache lacks of it) takes prefill time, in as many iterations as
    the token budget makes of it; each output token takes one iteration of the batch as it would
    be with the request in it. While the prompt is computed all others stand still for as long;
    while both decode, each iteration is longer by the request's own share.

    Args:
        row: One row of the table, shape (NUM_COLUMNS,).
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.

    Returns:
        Time to the first token, time from there to the last, and the sum of what all other
        requests in flight there are delayed by; seconds.
    """
    running = min(row[NUM_RUNNING], row[NUM_SLOTS] - 1.0)
    outstanding = row[NUM_WAITING] + row[NUM_RUNNING]
    kv = row[KV_USED_FRACTION] * row[KV_CAPACITY_TOKENS]
    tokens_to_prefill = context_tokens - row[MATCH_TOKENS]
    step = row[ITERATION_S] + row[SEQUENCE_S] * running + row[KV_TOKEN_S] * kv
    prefill = (
        tokens_to_prefill * row[PREFILL_TOKEN_S]
        + math.ceil(tokens_to_prefill / row[TOKEN_BUDGET]) * step
    )
    own_kv = context_tokens + output_tokens / 2.0
    own_step = row[SEQUENCE_S] + row[KV_TOKEN_S] * own_kv
    decode = max(output_tokens - 1.0, 0.0) * (step + own_step)
    others = 0.0
    if outstanding > 0.0:
        output_left = row[OUTPUT_IN_FLIGHT] / outstanding
        together = min(output_tokens, output_left)
        others = outstanding * (tokens_to_prefill * row[PREFILL_TOKEN_S] + together * own_step)
    return row[WAIT_S] + prefill, decode, others


@compiled
def request_delays(
    row: FloatArray, context_tokens: float, output_tokens: float
) -> tuple[float, float, float]:
    """What `batching_delays` returns, of a replica of either kind.

    One that does not batch has only one time: all before the last token is told as the time to the
    first. It delays only those whom the request would overtake, each by its own service.
    """
    if row[ITERATION_S] > 0.0:
        return batching_delays(row, context_tokens, output_tokens)
    service_s = (context_tokens + output_tokens) / row[TOKENS_PER_S]
    return row[WAIT_S] + service_s, 0.0, service_s * row[NUM_BEHIND] / row[NUM_SLOTS]


@compiled
def _fill_waits(columns: FloatArray) -> None:
    """Derive the wait of every replica that does not predict its own (`ReplicaSnapshot.wait_s`)."""
    for replica in range(columns.shape[0]):
        row = columns[replica]
        if not math.isnan(row[WAIT_S]):
            continue
        if row[ITERATION_S] > 0.0:
            row[WAIT_S] = batching_wait_s(row)
        elif row[NUM_WAITING] + row[NUM_RUNNING] < row[NUM_SLOTS]:
            row[WAIT_S] = 0.0
        else:
            row[WAIT_S] = row[TOKENS_IN_FLIGHT] / (row[TOKENS_PER_S] * row[NUM_SLOTS])


@compiled
def encode(
    request_features: FloatArray,
    context_tokens: float,
    predicted_total_tokens: float,
    columns: FloatArray,
    whole: bool,
    out: npt.NDArray[np.float32],
) -> int:
    """Write the observation of one decision and count the numbers that hit the bound.

    Args:
        request_features: `squash`ed features of the request, shape (NUM_REQUEST_FEATURES,).
        context_tokens: Length of its prompt, tokens.
        predicted_total_tokens: Size of the request as the router knows it, tokens.
        columns: The table, shape (num_replicas, NUM_COLUMNS).
        whole: Whether to add delays, tokens and memory of each replica.
        out: Filled with the observation, shape (observation_size(...),).

    Returns:
        How many numbers were beyond OBSERVATION_LIMIT and were set to it.
    """
    saturated = 0
    for i in range(NUM_REQUEST_FEATURES):
        out[i] = request_features[i]
    at = NUM_REQUEST_FEATURES
    for replica in range(columns.shape[0]):
        row = columns[replica]
        outstanding = row[NUM_WAITING] + row[NUM_RUNNING]
        first = at
        out[at] = math.log(1.0 + row[NUM_WAITING])
        out[at + 1] = math.log(1.0 + row[TOKENS_IN_FLIGHT] / 1000.0)
        # -1 says that nothing has completed yet; a response time gives a number above zero.
        out[at + 2] = (
            -1.0 if math.isnan(row[MEAN_RESPONSE_S]) else math.log(1.0 + row[MEAN_RESPONSE_S])
        )
        out[at + 3] = math.log(1.0 + outstanding / row[MAX_CONCURRENCY])
        out[at + 4] = row[NUM_RUNNING] / row[NUM_SLOTS]
        out[at + 5] = math.log(1.0 + row[TOKENS_PER_S] / 1000.0)
        at += NUM_REPLICA_FEATURES
        if whole:
            output_tokens = predicted_total_tokens - context_tokens
            prefill, decode, others = request_delays(row, context_tokens, output_tokens)
            out[at] = math.log(1.0 + row[WAIT_S])
            out[at + 1] = math.log(1.0 + (prefill + decode))
            out[at + 2] = math.log(1.0 + others)
            out[at + 3] = math.log(1.0 + row[PREFILL_IN_FLIGHT] / 1000.0)
            out[at + 4] = math.log(1.0 + row[OUTPUT_IN_FLIGHT] / 1000.0)
            out[at + 5] = row[KV_USED_FRACTION]
            out[at + 6] = row[MATCH_TOKENS] / max(context_tokens, 1.0)
            out[at + 7] = row[ROUTABLE]
            at += NUM_DELAY_FEATURES
        for i in range(first, at):
            if out[i] > OBSERVATION_LIMIT:
                saturated += 1
                out[i] = OBSERVATION_LIMIT
    return saturated
