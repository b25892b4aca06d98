"""Sequences of a replica: how they come to decode, and how they leave."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing import observation as ob
from tokenyard.routing.simulator import rewards as pay
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.clients import ask_again
from tokenyard.routing.simulator.batching_kernel.layout import pages_of, phase_at
from tokenyard.routing.simulator.batching_kernel.prefix_cache import register_blocks, release_pages
from tokenyard.routing.simulator.batching_kernel.queue import remove_waiting, waiting_at


@compiled
def update_min_finish(row, rules):
    """Find the step at which the next decoding sequence is done."""
    at = int(rules[lay.DECODE_AT])
    least = math.inf
    for _ in range(int(row[lay.DECODING])):
        least = min(least, row[at + lay.D_FINISH])
        at += lay.DECODE_FIELDS
    row[lay.MIN_FINISH] = least


@compiled_inline
def remove_decoding(replica, which):
    """Take a sequence out of the batch and release what it holds."""
    row = replica.row
    rules = replica.rules
    first = int(rules[lay.DECODE_AT])
    at = first + lay.DECODE_FIELDS * which
    kv = row[at + lay.D_BASE] + row[lay.STEP]
    row[lay.KV_SUM] -= kv
    row[phase_at(rules, row[at + lay.D_BASE])] -= 1.0
    release_pages(
        replica, int(row[at + lay.D_INDEX]), int(row[at + lay.D_HELD]), pages_of(rules, kv)
    )
    row[lay.DECODING] -= 1.0
    if replica.real:
        replica.own[
            int(replica.requests[int(row[at + lay.D_INDEX]), lay.ROUTER]), lay.OWN_DECODING
        ] -= 1.0
    last = first + lay.DECODE_FIELDS * int(row[lay.DECODING])
    for field in range(lay.DECODE_FIELDS):
        row[at + field] = row[last + field]


@compiled
def remove_prefilling(replica, which):
    """Take a sequence out of prefill and release what it holds; the order of others stays."""
    row = replica.row
    at = int(replica.rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * which
    pages = pages_of(replica.rules, row[at + lay.P_TO_PREFILL] + row[at + lay.P_KV])
    release_pages(replica, int(row[at + lay.P_INDEX]), int(row[at + lay.P_HELD]), pages)
    _forget_prefilling(row, replica.rules, which)


@compiled
def _forget_prefilling(row, rules, which):
    at = int(rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * which
    row[lay.PREFILLING] -= 1.0
    end = int(rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * int(row[lay.PREFILLING])
    for place in range(at, end):
        row[place] = row[place + lay.PREFILL_FIELDS]


@compiled_inline
def routers_receive(replica, steps):
    """Every router gets the tokens of its own sequences as they are generated."""
    for router in range(replica.own.shape[0]):
        own = replica.own[router]
        own[lay.OWN_GENERATED] += own[lay.OWN_DECODING] * steps


@compiled_inline
def router_acknowledge(replica, index, generated):
    """A request has left the replica: its router counts it as in flight no longer."""
    own = replica.own[int(replica.requests[index, lay.ROUTER])]
    own[lay.OWN_COUNT] -= 1.0
    own[lay.OWN_OUTPUT] -= replica.requests[index, lay.PREDICTED_OUTPUT]
    own[lay.OWN_GENERATED] -= generated
    # A request that was preempted had its first token before.
    if generated == 0.0:
        own[lay.OWN_PREFILL] -= replica.outcomes[index, lay.ASSUMED_PREFILL]


@compiled_inline
def count_latency(replica, latency_s, tokens):
    """Count tokens that came so long after the one before."""
    place = int(math.log(latency_s / lay.LATENCY_BIN_START_S) * lay.LATENCY_BINS_PER_E)
    replica.latencies[min(max(place, 0), lay.LATENCY_BINS - 1)] += tokens


@compiled_inline
def _met(requests, outcomes, index):
    """Whether a request that is done attained every SLO of its class."""
    ttft = outcomes[index, lay.FIRST_TOKEN_S] - requests[index, lay.ARRIVAL_S]
    response = outcomes[index, lay.FINISH_S] - requests[index, lay.ARRIVAL_S]
    steps = max(requests[index, lay.OUTPUT] - 1.0, 1.0)
    tpot = (response - ttft) / steps
    return (
        response <= requests[index, lay.SLO_RESPONSE_S]
        and ttft <= requests[index, lay.SLO_TTFT_S]
        and tpot <= requests[index, lay.SLO_TPOT_S]
    )


@compiled_inline
def reward_at(replica, index, now):
    """What the response of a request is worth if it ends now."""
    request = replica.requests[index]
    response = now - request[lay.ARRIVAL_S]
    return pay.response_reward(replica.rules, response, request[lay.SLO_RESPONSE_S])


@compiled_inline
def _finish(replica, index, now):
    """Take a request that has ended out of the sums of its replica; a copy adds it to its own."""
    row = replica.row
    if replica.real:
        if replica.rules[lay.LOOKS_AHEAD]:
            row[lay.RESPONSE_REWARD] -= reward_at(replica, index, now)
        return
    row[lay.RESPONSE_REWARD] += reward_at(replica, index, now)
    row[lay.FINISH_SUM_S] += now
    if row[lay.LOOKED_FOR] == index:
        row[lay.LOOKED_FINISH_S] = now


@compiled_inline
def _complete(replica, which, now):
    row = replica.row
    requests = replica.requests
    at = int(replica.rules[lay.DECODE_AT]) + lay.DECODE_FIELDS * which
    index = int(row[at + lay.D_INDEX])
    total = requests[index, lay.CONTEXT] + requests[index, lay.OUTPUT] - 1.0
    row[at + lay.D_HELD] = register_blocks(replica, index, int(row[at + lay.D_HELD]), total, now)
    remove_decoding(replica, which)
    _finish(replica, index, now)
    if not replica.real:
        return
    replica.outcomes[index, lay.FINISH_S] = now
    replica.outcomes[index, lay.GENERATED] += requests[index, lay.OUTPUT]
    router_acknowledge(replica, index, requests[index, lay.OUTPUT])
    ask_again(requests, replica.turns, replica.pending, index, now)
    own = replica.own[int(requests[index, lay.ROUTER])]
    response = now - requests[index, lay.ARRIVAL_S]
    own[lay.OWN_RESPONSE_S] = ob.recent_mean_s(own[lay.OWN_RESPONSE_S], response)
    row[lay.EARNED] += replica.rules[pay.COMPLETE]
    if _met(requests, replica.outcomes, index):
        replica.outcomes[index, lay.MET] = 1.0
    else:
        row[lay.EARNED] += replica.rules[pay.SLO_AT_COMPLETION]


@compiled_inline
def end_prefill(replica, which, now):
    """A sequence has computed all it lacked: it has a token, and decodes from now on."""
    row = replica.row
    rules = replica.rules
    at = int(rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * which
    index = int(row[at + lay.P_INDEX])
    generated = row[at + lay.P_GENERATED]
    kv = row[at + lay.P_KV]
    context = replica.requests[index, lay.CONTEXT]
    held = register_blocks(replica, index, int(row[at + lay.P_HELD]), context, now)
    if replica.real:
        own = replica.own[int(replica.requests[index, lay.ROUTER])]
        own[lay.OWN_DECODING] += 1.0
        own[lay.OWN_GENERATED] += 1.0
        if generated == 0.0:
            own[lay.OWN_PREFILL] -= replica.outcomes[index, lay.ASSUMED_PREFILL]
            replica.outcomes[index, lay.FIRST_TOKEN_S] = now
        else:
            count_latency(replica, now - replica.outcomes[index, lay.LAST_TOKEN_S], 1.0)
    to = int(rules[lay.DECODE_AT]) + lay.DECODE_FIELDS * int(row[lay.DECODING])
    finish = row[lay.STEP] + replica.requests[index, lay.OUTPUT] - generated - 1.0
    row[to + lay.D_INDEX] = index
    row[to + lay.D_ORDER] = row[at + lay.P_ORDER]
    row[to + lay.D_BASE] = kv - row[lay.STEP]
    row[to + lay.D_FINISH] = finish
    row[to + lay.D_HELD] = held
    row[lay.DECODING] += 1.0
    row[lay.KV_SUM] += kv
    row[phase_at(rules, kv - row[lay.STEP])] += 1.0
    row[lay.MIN_FINISH] = min(row[lay.MIN_FINISH], finish)
    _forget_prefilling(row, rules, which)


@compiled
def complete_all(replica, now):
    """Complete what is done, the request submitted first before the others."""
    row = replica.row
    while row[lay.MIN_FINISH] <= row[lay.STEP]:
        at = int(replica.rules[lay.DECODE_AT])
        first = -1
        earliest = math.inf
        for which in range(int(row[lay.DECODING])):
            submitted = replica.outcomes[int(row[at + lay.D_INDEX]), lay.SUBMITTED]
            if row[at + lay.D_FINISH] <= row[lay.STEP] and submitted < earliest:
                earliest = submitted
                first = which
            at += lay.DECODE_FIELDS
        _complete(replica, first, now)
        update_min_finish(row, replica.rules)


@compiled
def generated_tokens(replica, at):
    """Tokens that the decoding sequence at `at` has generated."""
    index = int(replica.row[at + lay.D_INDEX])
    return replica.requests[index, lay.OUTPUT] - (
        replica.row[at + lay.D_FINISH] - replica.row[lay.STEP]
    )


@compiled
def _abandon(replica, index, generated, now):
    """A client has hung up on a request that has just been removed."""
    _finish(replica, index, now)
    if replica.real:
        replica.outcomes[index, lay.GAVE_UP] = 1.0
        replica.outcomes[index, lay.GENERATED] += generated
        router_acknowledge(replica, index, generated)
        ask_again(replica.requests, replica.turns, replica.pending, index, now)


@compiled
def _next_impatient(replica, now):
    """Earliest submitted of those whose client has hung up or that have waited too long.

    Also renews the time at which the next one leaves.

    Returns:
        Index of the request (-1: none), 0 decoding, 1 in prefill or 2 waiting, and its place.
    """
    row = replica.row
    rules = replica.rules
    impatient = -1
    earliest = math.inf
    kind = 0
    place = 0
    row[lay.NEXT_ABANDON_S] = math.inf
    for k in range(3):
        if k == 0:
            at = int(rules[lay.DECODE_AT])
            count = int(row[lay.DECODING])
        elif k == 1:
            at = int(rules[lay.PREFILL_AT])
            count = int(row[lay.PREFILLING])
        else:
            at = 0
            count = int(row[lay.WAITING])
        for which in range(count):
            if k == 0:
                index = int(row[at + lay.DECODE_FIELDS * which + lay.D_INDEX])
            elif k == 1:
                index = int(row[at + lay.PREFILL_FIELDS * which + lay.P_INDEX])
            else:
                slot = waiting_at(row, rules, which)
                index = int(row[slot + lay.W_INDEX])
            abandon = replica.requests[index, lay.ABANDON_S]
            # Who was preempted has begun.
            if k == 2 and row[slot + lay.W_KEY_S] > -math.inf:
                abandon = min(abandon, lay.start_by_s(replica.requests, index))
            row[lay.NEXT_ABANDON_S] = min(row[lay.NEXT_ABANDON_S], abandon)
            submitted = replica.outcomes[index, lay.SUBMITTED]
            if abandon <= now and submitted < earliest:
                earliest = submitted
                impatient = index
                kind = k
                place = which
    return impatient, kind, place


@compiled
def abandon_impatient(replica, now):
    """Remove every request whose client has hung up by now, or that has waited too long."""
    row = replica.row
    rules = replica.rules
    while True:
        index, kind, place = _next_impatient(replica, now)
        if index < 0:
            return
        if kind == 0:
            generated = generated_tokens(
                replica, int(rules[lay.DECODE_AT]) + lay.DECODE_FIELDS * place
            )
            remove_decoding(replica, place)
            update_min_finish(row, rules)
        elif kind == 1:
            generated = row[
                int(rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * place + lay.P_GENERATED
            ]
            remove_prefilling(replica, place)
        else:
            generated = remove_waiting(row, rules, place)
        _abandon(replica, index, generated, now)
