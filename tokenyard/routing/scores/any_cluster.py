"""Scores of the policy for any cluster: one formula for every server, in units of the cluster.

A server's cost is what a hand rule says of it plus a learned correction. The correction is linear
in features of the server for the request, and its weights depend on two things: how fast the
server is beside the others, and how much work waits in the whole cluster (the pooled context). The
unit of time is taken from the cluster itself, so that the same weights mean the same on slow and on
fast servers. Nothing tells a server by its place, so permuting servers permutes their costs, and
any number of them is decided between (Zaheer et al. 2017, "Deep Sets", arXiv:1703.06114).

Why these features: for servers in FIFO order under Poisson traffic, the first step of policy
iteration from a random split adds the delay that a request of size z means for those that come
later: z times the sum of the wait and half the service, times load / (1 - load) (Hyytia et al.
2012, "Size- and state-aware dispatching problem with queue-specific job sizes"). The load is not
observed; the backlog stands for it.

Servers of constant rate. The unit of time u is what a server of mean capacity takes for a request
of mean size. With w the wait and s the service time in units of u, z the size relative to the mean,
x the time for which the request takes up the whole server, l by how much w + s exceeds the SLO, v
the logarithm of the server's capacity relative to the mean, and b = log(1 + the time in which the
cluster would work off all that waits), c = 1 - 1 / (mean number of slots), r the bounded lateness l
/ (1 + l / LATENESS_SCALE), and, where no server can attain the SLO, else 0, n = e / (e +
SPREAD_SCALE) max(1 - (e / SPREAD_LIMIT)^4, 0) FEW_SERVERS / (servers + 1) with e the coefficient of
variation of capacities, the cost is

    w + s + sum over m in (1, v, b, v b, c, v c) of m (weights[m] . f),
    f = (1, w, s, w z, x z, w sqrt(z), [l > 0], r, [w = 0], n, n r).

Where servers have one slot, the last two modulators are 0. What a rule that gives a server up does
is only seen where no server can attain the SLO: n is what lets the formula do so. Between equal
servers there is none to be given up, and n is 0.

Replicas that batch. The unit of time u is what the request would take from its admission to its
last token, mean over replicas. With w the wait, p the prefill, d the decoding and o the delay of
all others (`observation.batching_delays`, in units of u), k the share of KV memory in use, l by how
much w + p + d exceeds the SLO, and q = z / (1 + z) with z the size relative to the mean, the cost
is

    w + p + d + o + sum over m in (1, v, b, h, a, y, e) of m (weights[m] . f),
    f = (1, w, p, d, o, k, l / (1 + l / LATENESS_SCALE), w q, o q),

where v is the logarithm of the replica's speed relative to the mean, b = log(1 + mean wait), h the
share of u that is prefill, a = i / (i + AGE_SCALE) with i the mean number of iterations since
replicas were seen, y = t^2 / (t^2 + OUTPUT_SCALE^2) with t the tokens that requests in flight have
left on average, and e the coefficient of variation of speeds.

Both functions are compiled into the simulators' kernels and called as they are by the server. They
read the table of `tokenyard.routing.observation`.
"""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.types import FloatArray

NUM_SERVER_MODULATORS = 6
"""What weights depend on: 1, relative speed v, backlog b, v b, then share of slots c and c v."""
NUM_SERVER_FEATURES = 11
VIOLATION_FEATURES = slice(6, 8)
"""Places of those features of a server that are of SLO violations."""
HOPELESS_FEATURES = slice(9, 11)
"""Places of those that count only where no server can attain the SLO."""
SLOT_MODULATORS = slice(4, 6)
"""Places of the modulators that are 0 where servers take one request at a time."""
NUM_SERVER_WEIGHTS = NUM_SERVER_MODULATORS * NUM_SERVER_FEATURES
NUM_ENGINE_MODULATORS = 7
"""What weights depend on: 1, relative speed v, backlog b, share of prefill h, age of signals a,
length of replies y, spread of speeds e."""
NUM_ENGINE_FEATURES = 9
NUM_ENGINE_WEIGHTS = NUM_ENGINE_MODULATORS * NUM_ENGINE_FEATURES

LATENESS_SCALE = 30.0
"""Lateness of which more counts half: where nothing can attain the SLO a weight of
lateness can send it to where it is later still, and this bounds how far."""
SPREAD_SCALE = 0.05
"""Coefficient of variation of the servers' speeds at which giving one up counts half."""
SPREAD_LIMIT = 0.5
"""Where none is given up any more: what the slowest takes then is what the p99 is made of."""
FEW_SERVERS = 4
"""One more than the servers of which giving one up counts whole: among more it is given up less."""
AGE_SCALE = 10.0
"""Iterations after which what was seen of a replica counts as half old."""
OUTPUT_SCALE = 60.0
"""Tokens that requests in flight have left to generate at which replies count as half long."""


@compiled
def server_scores(
    weights: FloatArray,
    size_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
    columns: FloatArray,
    out: FloatArray,
) -> int:
    """Write the cost of every server: its expected response time plus a learned correction.

    The module's docstring has the formula. Zero weights are shortest expected delay.

    Args:
        weights: Shape (NUM_SERVER_WEIGHTS,), modulators first.
        size_tokens: Size of the request as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
        columns: The table, shape (num_replicas, NUM_COLUMNS).
        out: Filled with the costs, in units of u, shape (num_replicas,).

    Returns:
        Index of the cheapest server, the first of equals.
    """
    capacity = waiting = squares = slots = 0.0
    first_s = math.inf
    for server in range(columns.shape[0]):
        row = columns[server]
        own_capacity = row[ob.TOKENS_PER_S] * row[ob.NUM_SLOTS]
        capacity += own_capacity
        waiting += own_capacity * row[ob.WAIT_S]
        squares += own_capacity * own_capacity
        slots += row[ob.NUM_SLOTS]
        first_s = min(first_s, row[ob.WAIT_S] + size_tokens / row[ob.TOKENS_PER_S])
    slotted = 1.0 - columns.shape[0] / slots
    num_modulators = NUM_SERVER_MODULATORS if slotted > 0.0 else SLOT_MODULATORS.start
    mean_capacity = capacity / columns.shape[0]
    variance = squares / columns.shape[0] / (mean_capacity * mean_capacity) - 1.0
    # Rounding must not make equal servers unequal.
    spread = math.sqrt(variance) if variance > 1e-9 else 0.0
    hopeless = 0.0
    if first_s > slo_s:
        fades = max(1.0 - (spread / SPREAD_LIMIT) ** 4, 0.0)
        hopeless = spread / (spread + SPREAD_SCALE) * fades * FEW_SERVERS / (columns.shape[0] + 1)
    unit_s = mean_total_tokens / mean_capacity
    backlog = math.log(1.0 + waiting / capacity / unit_s)
    z = size_tokens / mean_total_tokens
    root = math.sqrt(z)
    best = 0
    for server in range(columns.shape[0]):
        row = columns[server]
        relative = row[ob.TOKENS_PER_S] * row[ob.NUM_SLOTS] / mean_capacity
        speed = math.log(relative)
        wait = row[ob.WAIT_S] / unit_s
        service = size_tokens / row[ob.TOKENS_PER_S] / unit_s
        lateness = max(wait + service - slo_s / unit_s, 0.0)
        violation = 1.0 if lateness > 0.0 else 0.0
        lateness = lateness / (1.0 + lateness / LATENESS_SCALE)
        idle = 1.0 if wait <= 0.0 else 0.0
        modulators = (1.0, speed, backlog, backlog * speed, slotted, slotted * speed)
        cost = wait + service
        for m in range(num_modulators):
            k = m * NUM_SERVER_FEATURES
            cost += modulators[m] * (
                weights[k]
                + weights[k + 1] * wait
                + weights[k + 2] * service
                + weights[k + 3] * wait * z
                + weights[k + 4] * z / relative * z
                + weights[k + 5] * wait * root
                + weights[k + 6] * violation
                + weights[k + 7] * lateness
                + weights[k + 8] * idle
                + hopeless * (weights[k + 9] + weights[k + 10] * lateness)
            )
        out[server] = cost
        if cost < out[best]:
            best = server
    return best


@compiled
def engine_scores(
    weights: FloatArray,
    context_tokens: float,
    output_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
    columns: FloatArray,
    out: FloatArray,
) -> int:
    """Write the cost of every replica that batches: the delay added there, corrected.

    The module's docstring has the formula. Zero weights are least marginal delay. Replicas that are
    not routable cost infinity and count in no mean.

    Args:
        weights: Shape (NUM_ENGINE_WEIGHTS,), modulators first.
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
        columns: The table, shape (num_replicas, NUM_COLUMNS).
        out: Filled with the costs, in units of u, shape (num_replicas,).

    Returns:
        Index of the cheapest replica, the first of equals; 0 where none is routable.
    """
    num, speeds, unit_s, context = _engine_context(context_tokens, output_tokens, columns)
    relative_size = (context_tokens + output_tokens) / mean_total_tokens
    size = relative_size / (1.0 + relative_size)
    best = 0
    for replica in range(columns.shape[0]):
        row = columns[replica]
        out[replica] = math.inf
        if row[ob.ROUTABLE] == 0.0:
            continue
        first_s, decode_s, others_s = ob.batching_delays(row, context_tokens, output_tokens)
        wait = row[ob.WAIT_S] / unit_s
        prefill = first_s / unit_s - wait
        decode = decode_s / unit_s
        others = others_s / unit_s
        lateness = max(wait + prefill + decode - slo_s / unit_s, 0.0)
        lateness = lateness / (1.0 + lateness / LATENESS_SCALE)
        speed = math.log(row[ob.TOKENS_PER_S] * row[ob.NUM_SLOTS] * num / speeds)
        modulators = (1.0, speed, *context)
        cost = wait + prefill + decode + others
        for m in range(NUM_ENGINE_MODULATORS):
            k = m * NUM_ENGINE_FEATURES
            cost += modulators[m] * (
                weights[k]
                + weights[k + 1] * wait
                + weights[k + 2] * prefill
                + weights[k + 3] * decode
                + weights[k + 4] * others
                + weights[k + 5] * row[ob.KV_USED_FRACTION]
                + weights[k + 6] * lateness
                + size * (weights[k + 7] * wait + weights[k + 8] * others)
            )
        out[replica] = cost
        if cost < out[best]:
            best = replica
    return best


@compiled
def _engine_context(
    context_tokens: float, output_tokens: float, columns: FloatArray
) -> tuple[int, float, float, tuple[float, float, float, float, float]]:
    """What weights depend on beside a replica's own speed.

    Returns:
        How many replicas are routable, the sum of their speeds (tokens per second), the unit of
        time (seconds), and b, h, a, y and e.
    """
    num = 0
    speeds = squares = waits_s = prefills_s = decodes_s = 0.0
    iterations = outstanding = output_left = 0.0
    for replica in range(columns.shape[0]):
        row = columns[replica]
        if row[ob.ROUTABLE] != 0.0:
            first_s, decode_s, _ = ob.batching_delays(row, context_tokens, output_tokens)
            num += 1
            speed = row[ob.TOKENS_PER_S] * row[ob.NUM_SLOTS]
            speeds += speed
            squares += speed * speed
            waits_s += row[ob.WAIT_S]
            prefills_s += first_s - row[ob.WAIT_S]
            decodes_s += decode_s
            iterations += row[ob.AGE_S] / row[ob.ITERATION_S]
            outstanding += row[ob.NUM_WAITING] + row[ob.NUM_RUNNING]
            output_left += row[ob.OUTPUT_IN_FLIGHT]
    unit_s = (prefills_s + decodes_s) / max(num, 1)
    backlog = math.log(1.0 + waits_s / max(num, 1) / unit_s) if num else 0.0
    prefill_share = prefills_s / (prefills_s + decodes_s) if num else 0.0
    age = iterations / (iterations + AGE_SCALE * max(num, 1))
    output_left /= max(outstanding, 1.0)
    length = output_left * output_left / (output_left * output_left + OUTPUT_SCALE * OUTPUT_SCALE)
    variance = squares * num / (speeds * speeds) - 1.0 if num else 0.0
    spread = math.sqrt(max(variance, 0.0))
    return num, speeds, unit_s, (backlog, prefill_share, age, length, spread)
