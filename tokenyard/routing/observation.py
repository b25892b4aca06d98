"""Snapshots to numbers: one code for training and serving.

A router's view of N replicas is a table of shape (num_replicas, NUM_COLUMNS), one row per
replica, in the units of `ReplicaSnapshot`. Two functions read it: `encode` makes the flat
observation of a network, `linear_scores` the costs of the linear policy. Both are compiled into
the simulator's kernel and called as they are by the server.

Least marginal delay, corrected (`marginal_scores`). With q the wait, t the time to the first token
after it, u the time of decoding, o what the others are delayed by (`batching_delays`, in units of
the SLO), z the size of the request relative to the mean, k the share of KV memory in use and r the
replica's speed rank, the cost is

    q + t + u + o + sum over p in 0..2 of r^p * (weights[p] . f),
    f = (1, q, t, u, o, (q + t + u) (z - 1), o (z - 1), k, max(q + t + u - 1, 0), d, e).

The last two are told where the queue is ordered: d is the part of q that is for those behind whom
the request would not wait, and e the part of o that is for those who would start before it. They
are 0 where nobody looked at the queues.

After these weights there may be SLO terms: two prices with three powers of the rank, a and b, and
the logarithms of five limits, v, relative to what is typical. They add

    sum over p in 0..2 of r^p * (a[p] [risky] + b[p] max((q + t) / limit_4 - 1, 0)),

with a choice risky where (q + t) > limit_0, the time per token after the first is more than
limit_1, (q + t + u) > limit_2 or z > limit_3. An SLO is met or violated, which a sum of delays
cannot express. A request that will violate its SLO on every replica should go where it delays
nobody else, and a fast replica should be loaded to just below the point where its requests start
to violate theirs.
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
TOKENS_PER_S = 0
NUM_SLOTS = 1
MAX_CONCURRENCY = 2
NUM_WAITING = 3
NUM_RUNNING = 4
TOKENS_IN_FLIGHT = 5
WAIT_S = 6
MEAN_RESPONSE_S = 7
SPEED_RANK = 8
# Of replicas that batch continuously, as in `EngineSnapshot`; all 0 for those that do not.
ITERATION_S = 9
PREFILL_TOKEN_S = 10
SEQUENCE_S = 11
KV_TOKEN_S = 12
TOKEN_BUDGET = 13
KV_CAPACITY_TOKENS = 14
KV_USED_FRACTION = 15
PREFILL_IN_FLIGHT = 16
OUTPUT_IN_FLIGHT = 17
MATCH_TOKENS = 18
# How old what was scraped is, and whether the replica is believed to take requests.
AGE_S = 19
ROUTABLE = 20
# Where the request would stand among those who wait (`policies.places`); 0 where nobody looked: by
# how many seconds its wait is shorter, and how many would start before it and after it.
OVERTAKEN_S = 21
NUM_BEFORE = 22
NUM_BEHIND = 23
NUM_COLUMNS = 24

NUM_REQUEST_FEATURES = 16
NUM_REPLICA_FEATURES = 6
NUM_FINISH_FEATURES = 2
NUM_BATCHING_FEATURES = 6

OBSERVATION_LIMIT = 20.0
"""Every observed number lies in [-20, 20]: they are logarithms, so the bound is e^20 units."""

NUM_PLACE_FEATURES = 2
"""The last features of both costs below: those that are 0 where nobody looked at the queues."""
NUM_SCORE_FEATURES = 7 + NUM_PLACE_FEATURES
NUM_SCORE_POWERS = 3
NUM_SCORE_WEIGHTS = NUM_SCORE_FEATURES * NUM_SCORE_POWERS
NUM_MARGINAL_FEATURES = 9 + NUM_PLACE_FEATURES
NUM_MARGINAL_WEIGHTS = NUM_MARGINAL_FEATURES * NUM_SCORE_POWERS
NUM_RULE_FEATURES = NUM_MARGINAL_FEATURES + 1
"""What is shown of every replica to those who learn the rule's weights (`encode_rule`)."""
NUM_SLO_PRICES = 2 * NUM_SCORE_POWERS
NUM_SLO_LIMITS = 5
NUM_SLO_WEIGHTS = NUM_SLO_PRICES + NUM_SLO_LIMITS
NUM_MARGINAL_SLO_WEIGHTS = NUM_MARGINAL_WEIGHTS + NUM_SLO_WEIGHTS
"""Length of a marginal policy's weights where it prices SLO violations."""
MARGINAL_WAIT, MARGINAL_OTHERS, MARGINAL_OVERTAKEN, MARGINAL_SPARED = 1, 4, 9, 10
"""Places of the weights, for all replicas alike, of the request's wait, of others' delays, and of
what is taken off either by the order: q, o, d and e of the module's docstring."""
SCORE_WAIT, SCORE_SERVICE, SCORE_OVERTAKEN, SCORE_DELAYED = 1, 2, 7, 8
"""Places of the weights of w, s, d and o of `linear_scores`, for all servers alike."""


def observation_size(num_replicas: int, expected_finish: bool, batches: bool = False) -> int:
    """Length of the flat observation: 40 for three replicas with expected finish times.

    Args:
        num_replicas: Replicas to choose from.
        expected_finish: Whether each replica's expected times are in it.
        batches: Whether the replicas batch continuously.
    """
    per_replica = NUM_REPLICA_FEATURES + (NUM_FINISH_FEATURES if expected_finish else 0)
    if batches:
        per_replica += NUM_BATCHING_FEATURES
    return NUM_REQUEST_FEATURES + num_replicas * per_replica


def finish_columns(num_replicas: int) -> list[int]:
    """Places of the finish times in an observation that has them (`encode`)."""
    per_replica = NUM_REPLICA_FEATURES + NUM_FINISH_FEATURES
    first = NUM_REQUEST_FEATURES + per_replica - 1
    return [first + per_replica * replica for replica in range(num_replicas)]


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


_TYPICAL_LIMITS = (0.2, 0.025, 0.5, 1.0, 0.2)
"""Of the first token, of each one after it, of the response (in units of the SLO), of the size
(relative to the mean), and of the first token again; where weights of zero put them."""


@compiled
def slo_limits(weights: FloatArray) -> tuple[float, float, float, float, float]:
    """Beyond what a choice is risky, by weights of shape (NUM_MARGINAL_SLO_WEIGHTS,)."""
    w = NUM_MARGINAL_WEIGHTS + NUM_SLO_PRICES
    return (
        _TYPICAL_LIMITS[0] * math.exp(weights[w]),
        _TYPICAL_LIMITS[1] * math.exp(weights[w + 1]),
        _TYPICAL_LIMITS[2] * math.exp(weights[w + 2]),
        _TYPICAL_LIMITS[3] * math.exp(weights[w + 3]),
        _TYPICAL_LIMITS[4] * math.exp(weights[w + 4]),
    )


@compiled
def slo_terms(
    limits: tuple[float, float, float, float, float],
    wait: float,
    prefill: float,
    decode: float,
    output_tokens: float,
    size: float,
) -> tuple[bool, float]:
    """What the SLO terms of a choice are made from: whether it is risky, and its lateness.

    Args:
        limits: Of `slo_limits`.
        wait: Until the replica could start, in units of the SLO, as are the next two.
        prefill: From then to the first token.
        decode: From the first token to the last.
        output_tokens: Output length as the router knows it, tokens.
        size: Of the request, relative to the mean.
    """
    token = decode / max(output_tokens - 1.0, 1.0)
    risky = (
        wait + prefill > limits[0]
        or token > limits[1]
        or wait + prefill + decode > limits[2]
        or size > limits[3]
    )
    return risky, max((wait + prefill) / limits[4] - 1.0, 0.0)


@compiled
def _slo_price(weights: FloatArray, risky: bool, lateness: float, rank: float) -> float:
    price = 0.0
    power = 1.0
    for p in range(NUM_SCORE_POWERS):
        w = NUM_MARGINAL_WEIGHTS + p
        price += power * (risky * weights[w] + lateness * weights[w + NUM_SCORE_POWERS])
        power *= rank
    return price


@compiled
def looks_at_queues(weights: FloatArray, num_features: int) -> bool:
    """Whether weights of a cost count where a request would stand among those who wait.

    Args:
        weights: Of `linear_scores` or `marginal_scores`.
        num_features: NUM_SCORE_FEATURES or NUM_MARGINAL_FEATURES.
    """
    for p in range(NUM_SCORE_POWERS):
        for w in range((p + 1) * num_features - NUM_PLACE_FEATURES, (p + 1) * num_features):
            if weights[w] != 0.0:
                return True
    return False


@compiled
def marginal_features(
    row: FloatArray,
    context_tokens: float,
    output_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
) -> tuple[
    float, float, float, float, float, float, float, float, float, float, float
]:  # fmt: skip
    """What the cost of one replica is made from: f of the module's docstring.

    The plain delay, which is least marginal delay's cost, is the sum of the second to the fifth.

    Args:
        row: One row of the table, shape (NUM_COLUMNS,).
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
    """
    excess = (context_tokens + output_tokens) / mean_total_tokens - 1.0
    first, decode, others = batching_delays(row, context_tokens, output_tokens)
    wait = row[WAIT_S] / slo_s
    prefill = first / slo_s - wait
    decode /= slo_s
    others /= slo_s
    own = wait + prefill + decode
    outstanding = row[NUM_WAITING] + row[NUM_RUNNING]
    before = row[NUM_BEFORE] / max(outstanding, row[NUM_BEFORE] + row[NUM_BEHIND], 1.0)
    return (
        1.0, wait, prefill, decode, others, own * excess, others * excess, row[KV_USED_FRACTION],
        max(own - 1.0, 0.0), row[OVERTAKEN_S] / slo_s, others * before,
    )  # fmt: skip


@compiled
def marginal_scores(
    weights: FloatArray,
    context_tokens: float,
    output_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
    columns: FloatArray,
    out: FloatArray,
) -> int:
    """Write the cost of every replica: the delay that the request adds there, corrected.

    The module's docstring has the formula. Zero weights are the rule of least marginal delay.
    Replicas that are not routable cost infinity.

    Args:
        weights: Shape (NUM_MARGINAL_WEIGHTS,), powers of the rank first, or with the SLO terms
            after them (NUM_MARGINAL_SLO_WEIGHTS,): a, b, v.
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
        columns: The table, shape (num_replicas, NUM_COLUMNS).
        out: Filled with the costs, in units of the SLO, shape (num_replicas,).

    Returns:
        Index of the cheapest replica, the first of equals.
    """
    excess = (context_tokens + output_tokens) / mean_total_tokens - 1.0
    prices_slo = weights.shape[0] > NUM_MARGINAL_WEIGHTS
    limits = slo_limits(weights) if prices_slo else _TYPICAL_LIMITS
    best = 0
    for replica in range(columns.shape[0]):
        row = columns[replica]
        (
            one,
            wait,
            prefill,
            decode,
            others,
            own_z,
            others_z,
            kv,
            late,
            overtaken,
            spared,
        ) = marginal_features(row, context_tokens, output_tokens, mean_total_tokens, slo_s)
        own = wait + prefill + decode
        cost = own + others
        power = 1.0
        for p in range(NUM_SCORE_POWERS):
            w = p * NUM_MARGINAL_FEATURES
            cost += power * (
                weights[w] * one
                + weights[w + 1] * wait
                + weights[w + 2] * prefill
                + weights[w + 3] * decode
                + weights[w + 4] * others
                + weights[w + 5] * own_z
                + weights[w + 6] * others_z
                + weights[w + 7] * kv
                + weights[w + 8] * late
                + weights[w + 9] * overtaken
                + weights[w + 10] * spared
            )
            power *= row[SPEED_RANK]
        if prices_slo:
            risky, lateness = slo_terms(limits, wait, prefill, decode, output_tokens, excess + 1.0)
            cost += _slo_price(weights, risky, lateness, row[SPEED_RANK])
        out[replica] = cost if row[ROUTABLE] != 0.0 else math.inf
        if out[replica] < out[best]:
            best = replica
    return best


@compiled
def encode(
    request_features: FloatArray,
    context_tokens: float,
    predicted_total_tokens: float,
    columns: FloatArray,
    expected_finish: bool,
    out: npt.NDArray[np.float32],
) -> int:
    """Write the observation of one decision and count the numbers that hit the bound.

    Args:
        request_features: `squash`ed features of the request, shape (NUM_REQUEST_FEATURES,).
        context_tokens: Length of its prompt, tokens.
        predicted_total_tokens: Size of the request as the router knows it, tokens.
        columns: The table, shape (num_replicas, NUM_COLUMNS).
        expected_finish: Whether to add the wait and the finish time of each replica.
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
        batches = row[ITERATION_S] > 0.0
        finish = row[WAIT_S] + predicted_total_tokens / row[TOKENS_PER_S]
        others = 0.0
        if batches:
            output_tokens = predicted_total_tokens - context_tokens
            prefill, decode, others = batching_delays(row, context_tokens, output_tokens)
            finish = prefill + decode
        if expected_finish:
            out[at] = math.log(1.0 + row[WAIT_S])
            out[at + 1] = math.log(1.0 + finish)
            at += NUM_FINISH_FEATURES
        if batches:
            out[at] = math.log(1.0 + others)
            out[at + 1] = math.log(1.0 + row[PREFILL_IN_FLIGHT] / 1000.0)
            out[at + 2] = math.log(1.0 + row[OUTPUT_IN_FLIGHT] / 1000.0)
            out[at + 3] = row[KV_USED_FRACTION]
            out[at + 4] = row[MATCH_TOKENS] / context_tokens
            out[at + 5] = row[ROUTABLE]
            at += NUM_BATCHING_FEATURES
        for i in range(first, at):
            if out[i] > OBSERVATION_LIMIT:
                saturated += 1
                out[i] = OBSERVATION_LIMIT
    return saturated


@compiled
def encode_rule(
    row: FloatArray,
    context_tokens: float,
    output_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
    out: npt.NDArray[np.float32],
) -> int:
    """Write what `marginal_scores` makes the cost of one replica from, for those who learn it.

    Args:
        row: One row of the table, shape (NUM_COLUMNS,).
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
        out: The first NUM_RULE_FEATURES numbers are filled, each squashed by sign(x) log(1 + |x|):
            `marginal_features`, then the speed rank.

    Returns:
        How many numbers were beyond OBSERVATION_LIMIT and were set to it.
    """
    saturated = 0
    features = marginal_features(row, context_tokens, output_tokens, mean_total_tokens, slo_s)
    for i in range(NUM_RULE_FEATURES):
        value = features[i] if i < NUM_MARGINAL_FEATURES else row[SPEED_RANK]
        size = math.log(1.0 + abs(value))
        if size > OBSERVATION_LIMIT:
            saturated += 1
            size = OBSERVATION_LIMIT
        out[i] = math.copysign(size, value)
    return saturated


@compiled
def linear_scores(
    weights: FloatArray,
    predicted_total_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
    columns: FloatArray,
    out: FloatArray,
) -> int:
    """Write the cost of every replica: its expected response time plus a learned correction.

    With w the wait, s the service time (both in units of the SLO), z the size of the request
    relative to the mean and r the replica's speed rank, the cost is

        w + s + sum over p in 0..2 of r^p * (weights[p] . f),
        f = (1, w, s, w (z - 1), s (z - 1), [w + s > 1], max(w + s - 1, 0), d, o).

    The last two are told where the queue is ordered: d is the part of w that is for those behind
    whom the request would not wait, and o is s for each of those per slot, whom it delays. They are
    0 where nobody looked at the queues. Zero weights are shortest expected delay; the powers of r
    let the correction differ between slow and fast replicas without tying a weight to a replica, so
    any number of them works.

    Args:
        weights: Shape (NUM_SCORE_WEIGHTS,), powers of the rank first.
        predicted_total_tokens: Size of the request as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
        columns: The table, shape (num_replicas, NUM_COLUMNS).
        out: Filled with the costs, in units of the SLO, shape (num_replicas,).

    Returns:
        Index of the cheapest replica, the first of equals.
    """
    excess = predicted_total_tokens / mean_total_tokens - 1.0
    best = 0
    for replica in range(columns.shape[0]):
        row = columns[replica]
        wait = row[WAIT_S] / slo_s
        service = predicted_total_tokens / (row[TOKENS_PER_S] * slo_s)
        lateness = max(wait + service - 1.0, 0.0)
        violation = 1.0 if lateness > 0.0 else 0.0
        overtaken = row[OVERTAKEN_S] / slo_s
        delayed = service * row[NUM_BEHIND] / row[NUM_SLOTS]
        cost = wait + service
        power = 1.0
        for p in range(NUM_SCORE_POWERS):
            w = p * NUM_SCORE_FEATURES
            cost += power * (
                weights[w]
                + weights[w + 1] * wait
                + weights[w + 2] * service
                + weights[w + 3] * wait * excess
                + weights[w + 4] * service * excess
                + weights[w + 5] * violation
                + weights[w + 6] * lateness
                + weights[w + 7] * overtaken
                + weights[w + 8] * delayed
            )
            power *= row[SPEED_RANK]
        out[replica] = cost
        if cost < out[best]:
            best = replica
    return best
