"""What the router sees."""

from __future__ import annotations

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing import observation as ob
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.layout import replica_of
from tokenyard.routing.simulator.batching_kernel.prefix_cache import (
    keeps_times,
    num_chained,
)


@compiled_inline
def _find_hits(fleet, copy, index):
    """Write the tokens of a request's prefix that each replica has cached; all in one walk."""
    rules = fleet.rules
    num = fleet.replica_params.shape[1]
    table = fleet.tables[copy]
    for first in range(0, num, lay.REPLICAS_PER_WORD):
        replica = replica_of(fleet, copy, first)
        most = num_chained(replica, index, replica.requests[index, lay.CONTEXT] - 1.0)
        at = int(replica.requests[index, lay.CHAIN_AT])
        end = min(num, first + lay.REPLICAS_PER_WORD)
        table[first:end, ob.MATCH_TOKENS] = most * rules[lay.BLOCK_TOKENS]
        has = -1
        for k in range(most):
            still = has & replica.cached[replica.chains[at + k]]
            if still == has:
                continue
            for server in range(first, end):
                if (has ^ still) >> (server - first) & 1:
                    table[server, ob.MATCH_TOKENS] = k * rules[lay.BLOCK_TOKENS]
            has = still
            if has == 0:
                break


@compiled
def _believed_blocks(replica, index):
    """Blocks of a request's prefix that its router believes to be cached.

    It knows the blocks that were there at the last scrape, and those it has sent since.
    """
    row = replica.row
    most = num_chained(replica, index, replica.requests[index, lay.CONTEXT] - 1.0)
    at = int(replica.requests[index, lay.CHAIN_AT])
    sent = lay.SENT_S + int(replica.requests[index, lay.ROUTER])
    scraped = row[lay.SCRAPED_S]
    match = 0
    while match < most:
        block = replica.chains[at + match]
        there = replica.block_s[lay.CAME_S, block] <= scraped and (
            replica.cached[block] & replica.bit or replica.block_s[lay.WENT_S, block] > scraped
        )
        if not (there or replica.block_s[sent, block] > scraped):
            break
        match += 1
    return match


@compiled_inline
def _fill_row(replica, index, now, out):
    row = replica.row
    params = replica.params
    own = replica.own[int(replica.requests[index, lay.ROUTER])]
    out[ob.TOKENS_PER_S] = params[lay.TOKENS_PER_S]
    out[ob.NUM_SLOTS] = params[lay.MAX_BATCH]
    out[ob.MAX_CONCURRENCY] = params[lay.MAX_BATCH]
    # What was sent and what came back since the scrape is known at once.
    since = own[lay.OWN_COUNT] - own[lay.OWN_COUNT_AT_SCRAPE]
    waiting = row[lay.SCRAPED_WAITING]
    running = row[lay.SCRAPED_RUNNING]
    outstanding = max(waiting + running + since, own[lay.OWN_COUNT])
    if waiting > 0.0:
        waiting = max(outstanding - running, 0.0)
    else:
        waiting = max(outstanding - params[lay.MAX_BATCH], 0.0)
    out[ob.NUM_WAITING] = waiting
    out[ob.NUM_RUNNING] = outstanding - waiting
    # Others' requests are taken to be like one's own.
    share = outstanding / own[lay.OWN_COUNT] if own[lay.OWN_COUNT] > 0.0 else 0.0
    left = max(own[lay.OWN_OUTPUT] - own[lay.OWN_GENERATED], own[lay.OWN_COUNT])
    out[ob.PREFILL_IN_FLIGHT] = max(own[lay.OWN_PREFILL], 0.0) * share
    out[ob.OUTPUT_IN_FLIGHT] = left * share
    out[ob.TOKENS_IN_FLIGHT] = out[ob.PREFILL_IN_FLIGHT] + out[ob.OUTPUT_IN_FLIGHT]
    out[ob.MEAN_RESPONSE_S] = own[lay.OWN_RESPONSE_S]
    out[ob.SPEED_RANK] = params[lay.RANK]
    out[ob.ITERATION_S] = params[lay.ITERATION_S]
    out[ob.PREFILL_TOKEN_S] = params[lay.PREFILL_TOKEN_S]
    out[ob.SEQUENCE_S] = params[lay.SEQUENCE_S]
    out[ob.KV_TOKEN_S] = params[lay.KV_TOKEN_S]
    out[ob.TOKEN_BUDGET] = params[lay.TOKEN_BUDGET]
    out[ob.KV_CAPACITY_TOKENS] = params[lay.NUM_PAGES] * replica.rules[lay.PAGE_TOKENS]
    out[ob.KV_USED_FRACTION] = row[lay.SCRAPED_KV]
    if keeps_times(replica):
        out[ob.MATCH_TOKENS] = _believed_blocks(replica, index) * replica.rules[lay.BLOCK_TOKENS]
    out[ob.AGE_S] = now - row[lay.SCRAPED_S]
    out[ob.ROUTABLE] = row[lay.SCRAPED_STATUS] == lay.UP
    out[ob.WAIT_S] = ob.batching_wait_s(out)
    out[ob.OVERTAKEN_S] = 0.0
    out[ob.NUM_BEFORE] = 0.0
    out[ob.NUM_BEHIND] = 0.0


@compiled
def fill_table(fleet, copy):
    """Write what the router of the current request may know of one copy's replicas."""
    index = int(fleet.clock[copy, lay.CURRENT])
    if index < 0:
        return
    _find_hits(fleet, copy, index)
    for server in range(fleet.replica_params.shape[1]):
        replica = replica_of(fleet, copy, server)
        _fill_row(replica, index, fleet.clock[copy, lay.NOW_S], fleet.tables[copy, server])
