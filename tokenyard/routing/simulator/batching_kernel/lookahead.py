"""What a replica will do if nothing more comes, played in a copy of what it holds."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.iteration import begin, end_iteration, time_of
from tokenyard.routing.simulator.batching_kernel.layout import ReplicaView
from tokenyard.routing.simulator.batching_kernel.queue import waiting_at
from tokenyard.routing.simulator.batching_kernel.sequences import reward_at


@compiled
def copy_row(row, rules, to):
    """Copy what a replica holds, leaving out the empty places."""
    for place in range(lay.NUM_SCALARS + int(rules[lay.PAGE_TOKENS])):
        to[place] = row[place]
    at = int(rules[lay.PREFILL_AT])
    for place in range(at, at + lay.PREFILL_FIELDS * int(row[lay.PREFILLING])):
        to[place] = row[place]
    at = int(rules[lay.DECODE_AT])
    for place in range(at, at + lay.DECODE_FIELDS * int(row[lay.DECODING])):
        to[place] = row[place]
    at = int(rules[lay.RING_AT])
    to[at] = row[at]
    to[at + 1] = row[at + 1]
    for ahead in range(int(row[at + 1])):
        first = waiting_at(row, rules, ahead)
        for place in range(first, first + lay.WAITING_FIELDS):
            to[place] = row[place]


@compiled
def copied(replica, scratch):
    """A copy in `scratch` of what the replica holds, which can be run without a trace."""
    copy_row(replica.row, replica.rules, scratch)
    return ReplicaView(
        scratch, replica.params, replica.rules, replica.requests, replica.chains, replica.links,
        replica.cached, replica.bit, replica.block_s, replica.own, replica.outcomes,
        replica.latencies, replica.turns, replica.pending, replica.factors, False,
    )  # fmt: skip


@compiled
def play_out(ahead, index):
    """Run a copy to its end, as if nothing more came.

    Its row then has what all responses are worth, and the energy that the work will have taken.

    Returns:
        Sum of the times at which all requests leave, and that of request `index`, seconds.
    """
    row = ahead.row
    row[lay.RESPONSE_REWARD] = 0.0
    row[lay.FINISH_SUM_S] = 0.0
    row[lay.LOOKED_FOR] = index
    while row[lay.BUSY] and not _only_decodes(row, ahead.rules, ahead.factors.shape[0] > 0):
        end_iteration(ahead)
        begin(ahead, row[lay.UNTIL_S], math.inf)
    _finish_decoding(ahead)
    return row[lay.FINISH_SUM_S], row[lay.LOOKED_FINISH_S]


@compiled
def _only_decodes(row, rules, has_factors):
    """Whether all that is left is decoding which nothing can interrupt."""
    if row[lay.PREFILLING] > 0.0 or row[lay.WAITING] > 0.0 or row[lay.NEXT_ABANDON_S] < math.inf:
        return False
    if has_factors or row[lay.UNTIL_S] < row[lay.WARM_UNTIL_S]:
        return False
    at = int(rules[lay.DECODE_AT])
    tokens = 0.0
    for _ in range(int(row[lay.DECODING])):
        tokens += row[at + lay.D_FINISH] - row[lay.STEP]
        at += lay.DECODE_FIELDS
    return row[lay.FREE] + row[lay.EVICTABLE] >= row[lay.DECODING] + tokens / rules[lay.PAGE_TOKENS]


@compiled
def _finish_decoding(replica):
    """Let the decoding sequences end one after the other, looking at nothing else."""
    row = replica.row
    params = replica.params
    first = int(replica.rules[lay.DECODE_AT])
    left = int(row[lay.DECODING])
    kv = row[lay.KV_SUM]
    step = row[lay.STEP]
    # What the iteration in progress takes was accounted for when it began.
    end = row[lay.UNTIL_S]
    if left > 0:
        step += 1.0
        kv += left
    joules = 0.0
    while left > 0:
        least = math.inf
        at = first
        for _ in range(left):
            least = min(least, row[at + lay.D_FINISH])
            at += lay.DECODE_FIELDS
        ahead = least - step
        base = params[lay.ITERATION_S] + params[lay.SEQUENCE_S] * left + params[lay.KV_TOKEN_S] * kv
        end += time_of(base, params[lay.KV_TOKEN_S] * left, ahead)
        joules += ahead * (
            params[lay.ITERATION_J]
            + params[lay.SEQUENCE_J] * left
            + params[lay.KV_TOKEN_J] * (kv + left * (ahead - 1.0) / 2.0)
        )
        step = least
        kv += ahead * left
        at = first
        which = 0
        while which < left:
            if row[at + lay.D_FINISH] > step:
                which += 1
                at += lay.DECODE_FIELDS
                continue
            kv -= row[at + lay.D_BASE] + step
            index = int(row[at + lay.D_INDEX])
            row[lay.RESPONSE_REWARD] += reward_at(replica, index, end)
            row[lay.FINISH_SUM_S] += end
            if row[lay.LOOKED_FOR] == index:
                row[lay.LOOKED_FINISH_S] = end
            left -= 1
            last = first + lay.DECODE_FIELDS * left
            for field in range(lay.D_FINISH + 1):
                row[at + field] = row[last + field]
    row[lay.BUSY_J] += joules
