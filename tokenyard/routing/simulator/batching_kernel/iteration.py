"""Iterations of a replica: admission, preemption, and stretches that only decode at once."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel import sequences
from tokenyard.routing.simulator.batching_kernel.layout import pages_of, pages_per_block, phase_at
from tokenyard.routing.simulator.batching_kernel.prefix_cache import (
    hit_blocks,
    hold_blocks,
    take_pages,
)
from tokenyard.routing.simulator.batching_kernel.queue import (
    dequeue,
    enqueue,
    set_back_late,
    waiting_at,
)


@compiled
def end_iteration(replica):
    """Hand out the tokens of the iteration in progress."""
    row = replica.row
    now = row[lay.UNTIL_S]
    decoding = row[lay.DECODING]
    if decoding > 0.0:
        row[lay.STEP] += 1.0
        row[lay.KV_SUM] += decoding
        if replica.real:
            sequences.routers_receive(replica, 1.0)
    which = 0
    while which < int(row[lay.PREFILLING]):
        at = int(replica.rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * which
        row[at + lay.P_TO_PREFILL] -= row[at + lay.P_CHUNK]
        row[at + lay.P_KV] += row[at + lay.P_CHUNK]
        if row[at + lay.P_TO_PREFILL] == 0.0:
            sequences.end_prefill(replica, which, now)
        else:
            which += 1
    if row[lay.MIN_FINISH] <= row[lay.STEP]:
        sequences.complete_all(replica, now)


@compiled
def _preempt_one(replica, now):
    """Send the least urgent running sequence, the last admitted of these, back to its queue."""
    row = replica.row
    rules = replica.rules
    victim = -1
    decodes = False
    priority = -1.0
    order = -1.0
    for k in range(2):
        at = int(rules[lay.DECODE_AT]) if k == 0 else int(rules[lay.PREFILL_AT])
        fields = lay.DECODE_FIELDS if k == 0 else lay.PREFILL_FIELDS
        for which in range(int(row[lay.DECODING]) if k == 0 else int(row[lay.PREFILLING])):
            # Index and order stand in the same places of both kinds.
            own = replica.requests[int(row[at + lay.D_INDEX]), lay.PRIORITY]
            if own > priority or (own == priority and row[at + lay.D_ORDER] > order):
                priority = own
                order = row[at + lay.D_ORDER]
                victim = which
                decodes = k == 0
            at += fields
    if decodes:
        at = int(rules[lay.DECODE_AT]) + lay.DECODE_FIELDS * victim
        index = int(row[at + lay.D_INDEX])
        generated = sequences.generated_tokens(replica, at)
        if replica.real:
            replica.outcomes[index, lay.LAST_TOKEN_S] = now
        sequences.remove_decoding(replica, victim)
        sequences.update_min_finish(row, rules)
    else:
        at = int(rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * victim
        index = int(row[at + lay.P_INDEX])
        generated = row[at + lay.P_GENERATED]
        sequences.remove_prefilling(replica, victim)
    enqueue(replica, index, generated, -math.inf, math.inf, math.inf, -math.inf)
    if replica.real:
        replica.outcomes[index, lay.PREEMPTIONS] += 1.0


@compiled
def _pages_for_decode(row, rules, step):
    """Pages that the decoding sequences need for the token after so many steps."""
    return row[phase_at(rules, -step)]


@compiled_inline
def _admission(replica, now):
    """Whether the next request may run now, after those who are late have gone back.

    Returns:
        Whether one may, the blocks of its hit, and the pages that it needs beside them.
    """
    row = replica.row
    rules = replica.rules
    if (
        row[lay.WAITING] == 0.0
        or row[lay.DECODING] + row[lay.PREFILLING] >= replica.params[lay.MAX_BATCH]
    ):
        return False, 0, 0.0
    set_back_late(replica, now)
    slot = waiting_at(row, rules, 0)
    index = int(row[slot + lay.W_INDEX])
    hit = hit_blocks(replica, index)
    pages = pages_of(rules, replica.requests[index, lay.CONTEXT] + row[slot + lay.W_GENERATED])
    spare = row[lay.FREE] + row[lay.EVICTABLE]
    if pages <= spare:
        # Pages of the hit that are evictable now are among those that it saves.
        return True, hit, pages - hit * pages_per_block(rules) if hit else pages
    if hit:
        pages -= hit * pages_per_block(rules)
        chain = int(replica.requests[index, lay.CHAIN_AT])
        for block in replica.chains[chain : chain + hit]:
            if replica.links[lay.HOLDERS, block] == 0:
                spare -= pages_per_block(rules)
    if pages > spare:
        return False, 0, 0.0
    return True, hit, pages


@compiled_inline
def _admit(replica, hit, pages, budget, now):
    """Let the first that waits run; return its tokens in this iteration, and those of its hit."""
    row = replica.row
    rules = replica.rules
    slot = waiting_at(row, rules, 0)
    index = int(row[slot + lay.W_INDEX])
    generated = row[slot + lay.W_GENERATED]
    dequeue(row, rules)
    hold_blocks(replica, index, hit)
    take_pages(replica, pages, now)
    cached = hit * rules[lay.BLOCK_TOKENS]
    tokens_to_prefill = replica.requests[index, lay.CONTEXT] + generated - cached
    chunk = min(tokens_to_prefill, budget)
    to = int(rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * int(row[lay.PREFILLING])
    row[to + lay.P_INDEX] = index
    row[to + lay.P_ORDER] = row[lay.ADMITTED]
    row[to + lay.P_TO_PREFILL] = tokens_to_prefill
    row[to + lay.P_KV] = cached
    row[to + lay.P_CHUNK] = chunk
    row[to + lay.P_GENERATED] = generated
    row[to + lay.P_HELD] = hit
    row[lay.PREFILLING] += 1.0
    row[lay.ADMITTED] += 1.0
    if replica.real:
        replica.outcomes[index, lay.HIT_TOKENS] += cached
        replica.outcomes[index, lay.PREFILLED_TOKENS] += tokens_to_prefill
    return chunk, cached


@compiled_inline
def time_of(base, growth, count):
    """Time of `count` iterations, the first of which takes `base`, each `growth` more."""
    return count * base + growth * count * (count - 1.0) / 2.0


@compiled_inline
def whole_iterations(base, growth, time, most):
    """Most iterations, up to `most`, that fit into `time`."""
    if time_of(base, growth, most) <= time:
        return most
    half = base - growth / 2.0
    # The root of the quadratic without cancellation, for small growth too.
    count = math.floor(2.0 * time / (half + math.sqrt(half * half + 2.0 * growth * time)))
    while count > 0.0 and time_of(base, growth, count) > time:
        count -= 1.0
    while count < most and time_of(base, growth, count + 1.0) <= time:
        count += 1.0
    return min(count, most)


@compiled_inline
def _pages_of_steps(row, rules, step, steps):
    """Pages that the decoding sequences need for so many more tokens each, after `step`."""
    page = int(rules[lay.PAGE_TOKENS])
    left = int(steps)
    pages = 0.0
    if left >= page:
        pages = left // page * row[lay.DECODING]
        left %= page
    phase = phase_at(rules, -step)
    end = lay.NUM_SCALARS + page
    for _ in range(left):
        pages += row[phase]
        phase += 1
        if phase == end:
            phase = lay.NUM_SCALARS
    return pages


@compiled_inline
def _account_work(replica, iterations, prefill, decoding, kv, duration):
    """Add up time and energy of iterations with these sums over them."""
    row = replica.row
    params = replica.params
    joules = (
        params[lay.ITERATION_J] * iterations
        + params[lay.PREFILL_TOKEN_J] * prefill
        + params[lay.SEQUENCE_J] * decoding
        + params[lay.KV_TOKEN_J] * kv
    )
    row[lay.ITERATIONS] += iterations
    row[lay.BUSY_S] += duration
    row[lay.BUSY_J] += joules
    row[lay.TAKES_S] = duration
    row[lay.TAKES_J] = joules
    if replica.real and decoding > 0.0:
        sequences.count_latency(replica, duration / iterations, decoding)


@compiled
def _skip_ahead(replica, now, until):
    """Cross iterations that only decode, and that end by `until`, at once.

    It stops before an iteration at whose end a sequence completes, or at whose start a client
    hangs up, the first that waits is late, the replica is warm, or pages run out. Returns the time
    at which it stops.
    """
    row = replica.row
    params = replica.params
    decoding = row[lay.DECODING]
    most = row[lay.MIN_FINISH] - row[lay.STEP] - 1.0
    factor = 1.0
    limit = row[lay.NEXT_ABANDON_S]
    if row[lay.WAITING] > 0.0:
        late_at_s = row[waiting_at(row, replica.rules, 0) + lay.W_LATE_AT_S]
        if late_at_s >= now:
            limit = min(limit, late_at_s)
    if now < row[lay.WARM_UNTIL_S]:
        factor = params[lay.WARM_UP_FACTOR]
        limit = min(limit, row[lay.WARM_UNTIL_S])
    base = (
        params[lay.ITERATION_S]
        + params[lay.SEQUENCE_S] * decoding
        + params[lay.KV_TOKEN_S] * row[lay.KV_SUM]
    )
    base *= factor
    if most < 1.0 or now + base > until or replica.factors.shape[0] > 0:
        return now
    growth = factor * params[lay.KV_TOKEN_S] * decoding
    steps = whole_iterations(base, growth, until - now, most)
    if limit < math.inf:
        starts = whole_iterations(base, growth, limit - now, most)
        if now + time_of(base, growth, starts) < limit:
            starts += 1.0
        steps = min(steps, starts)
    pages = _pages_of_steps(row, replica.rules, row[lay.STEP], steps)
    spare = row[lay.FREE] + row[lay.EVICTABLE]
    if pages > spare:
        steps = 0.0
        pages = 0.0
        ahead = _pages_for_decode(row, replica.rules, row[lay.STEP])
        while pages + ahead <= spare:
            pages += ahead
            steps += 1.0
            ahead = _pages_for_decode(row, replica.rules, row[lay.STEP] + steps)
    if steps < 1.0:
        return now
    duration = time_of(base, growth, steps)
    kv = steps * row[lay.KV_SUM] + decoding * steps * (steps - 1.0) / 2.0
    take_pages(replica, pages, now)
    _account_work(replica, steps, 0.0, steps * decoding, kv, duration)
    row[lay.STEP] += steps
    row[lay.KV_SUM] += steps * decoding
    if replica.real:
        sequences.routers_receive(replica, steps)
    return now + duration


@compiled
def begin(replica, now, until):
    """Begin an iteration at `now`, or later where some could be skipped; or become idle."""
    row = replica.row
    params = replica.params
    rules = replica.rules
    while True:
        if row[lay.NEXT_ABANDON_S] <= now:
            sequences.abandon_impatient(replica, now)
        if row[lay.PREFILLING] > 0.0 or row[lay.DECODING] == 0.0 or _admission(replica, now)[0]:
            break
        later = _skip_ahead(replica, now, until)
        if later == now:
            break
        now = later
    preempted = False
    while _pages_for_decode(row, rules, row[lay.STEP]) > row[lay.FREE] + row[lay.EVICTABLE]:
        _preempt_one(replica, now)
        preempted = True
    take_pages(replica, _pages_for_decode(row, rules, row[lay.STEP]), now)
    decoding = row[lay.DECODING]
    budget = params[lay.TOKEN_BUDGET] - decoding
    prefill = 0.0
    kv = row[lay.KV_SUM]
    at = int(rules[lay.PREFILL_AT])
    for _ in range(int(row[lay.PREFILLING])):
        chunk = min(row[at + lay.P_TO_PREFILL], budget)
        row[at + lay.P_CHUNK] = chunk
        if chunk > 0.0:
            prefill += chunk
            budget -= chunk
            kv += row[at + lay.P_KV]
        at += lay.PREFILL_FIELDS
    while not preempted and budget > 0.0 and row[lay.WAITING] > 0.0:
        may_run, hit, pages = _admission(replica, now)
        if not may_run:
            break
        chunk, cached = _admit(replica, hit, pages, budget, now)
        prefill += chunk
        budget -= chunk
        kv += cached
    row[lay.BUSY] = decoding > 0.0 or prefill > 0.0
    if not row[lay.BUSY]:
        return
    duration = (
        params[lay.ITERATION_S]
        + params[lay.PREFILL_TOKEN_S] * prefill
        + params[lay.SEQUENCE_S] * decoding
        + params[lay.KV_TOKEN_S] * kv
    )
    if now < row[lay.WARM_UNTIL_S]:
        duration *= params[lay.WARM_UP_FACTOR]
    if replica.factors.shape[0] > 0:
        duration *= replica.factors[int(row[lay.ITERATIONS]) % replica.factors.shape[0]]
    _account_work(replica, 1.0, prefill, decoding, kv, duration)
    row[lay.UNTIL_S] = now + duration


@compiled_inline
def _keep_decoding(replica, until):
    """End the iteration in progress, and cross all that end by `until`, where all only decode.

    The same as `end_iteration` and `begin`, whose many questions have the answer no. Returns False,
    and does nothing, where one may not: requests come or go, or pages have to be evicted.
    """
    row, params = replica.row, replica.params
    now = row[lay.UNTIL_S]
    decoding = row[lay.DECODING]
    step = row[lay.STEP] + 1.0
    most = row[lay.MIN_FINISH] - step - 1.0
    if (
        row[lay.PREFILLING] > 0.0 or row[lay.WAITING] > 0.0 or decoding == 0.0 or most < 0.0
        or row[lay.NEXT_ABANDON_S] <= until or now < row[lay.WARM_UNTIL_S]
        or replica.factors.shape[0] > 0
    ):  # fmt: skip
        return False
    kv = row[lay.KV_SUM] + decoding
    fixed = params[lay.ITERATION_S] + params[lay.SEQUENCE_S] * decoding
    base = fixed + params[lay.KV_TOKEN_S] * kv
    growth = params[lay.KV_TOKEN_S] * decoding
    steps, skipped_s, skipped_kv = 0.0, 0.0, 0.0
    if most >= 1.0 and now + base <= until:
        steps = whole_iterations(base, growth, until - now, most)
    pages = _pages_of_steps(row, replica.rules, step, steps + 1.0)
    if steps > 0.0:
        skipped_s = time_of(base, growth, steps)
        skipped_kv = steps * kv + decoding * steps * (steps - 1.0) / 2.0
        kv += steps * decoding
        base = fixed + params[lay.KV_TOKEN_S] * kv
        # By rounding one more may end in time.
        if most - steps >= 1.0 and now + skipped_s + base <= until:
            return False
    if pages > row[lay.FREE]:
        return False
    if steps > 0.0:
        _account_work(replica, steps, 0.0, steps * decoding, skipped_kv, skipped_s)
    _account_work(replica, 1.0, 0.0, decoding, kv, base)
    row[lay.FREE] -= pages
    row[lay.STEP] = step + steps
    row[lay.KV_SUM] = kv
    row[lay.UNTIL_S] = now + skipped_s + base
    if replica.real:
        sequences.routers_receive(replica, 1.0 + steps)
    return True


@compiled
def _iterate(replica, until):
    """End the iteration in progress and begin the next one."""
    end_iteration(replica)
    begin(replica, replica.row[lay.UNTIL_S], until)


@compiled_inline
def advance(replica, until):
    """Run one replica up to and including `until`."""
    row = replica.row
    while row[lay.BUSY] and row[lay.UNTIL_S] <= until:
        if not _keep_decoding(replica, until):
            _iterate(replica, until)
