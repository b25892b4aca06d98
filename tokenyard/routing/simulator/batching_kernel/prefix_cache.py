"""Pages and the prefix cache. In a look ahead only the counts of pages move, not the blocks."""

from __future__ import annotations

from tokenyard.compiled import compiled_inline
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.layout import pages_per_block


@compiled_inline
def _unlink(links, block):
    before = links[lay.BEFORE, block]
    after = links[lay.AFTER, block]
    links[lay.AFTER, before] = after
    links[lay.BEFORE, after] = before


@compiled_inline
def _link_last(links, block):
    """Make a block the last one to be evicted."""
    last = links[lay.BEFORE, lay.ANCHOR]
    links[lay.AFTER, last] = block
    links[lay.BEFORE, block] = last
    links[lay.AFTER, block] = lay.ANCHOR
    links[lay.BEFORE, lay.ANCHOR] = block


@compiled_inline
def keeps_times(replica):
    """Whether its router may know less of its cache than is true."""
    return replica.params[lay.SCRAPE_INTERVAL_S] > 0.0


@compiled_inline
def take_pages(replica, pages, now):
    """Use so many pages, evicting what is oldest where too few are free."""
    row = replica.row
    size = pages_per_block(replica.rules)
    while row[lay.FREE] < pages:
        if replica.real:
            block = replica.links[lay.AFTER, lay.ANCHOR]
            _unlink(replica.links, block)
            replica.cached[block] &= ~replica.bit
            if keeps_times(replica):
                replica.block_s[lay.WENT_S, block] = now
        row[lay.EVICTABLE] -= size
        row[lay.FREE] += size
    row[lay.FREE] -= pages


@compiled_inline
def num_chained(replica, index, tokens):
    """Blocks of a request's chain that lie within so many tokens."""
    size = replica.rules[lay.BLOCK_TOKENS]
    if size == 0.0:
        return 0
    return min(int(tokens // size), int(replica.requests[index, lay.CHAIN_LENGTH]))


@compiled_inline
def hit_blocks(replica, index):
    """Length of the longest prefix of a request's chain that the cache holds, in blocks.

    The last token of a prompt is always computed: what comes after it is not in any cache.
    """
    most = num_chained(replica, index, replica.requests[index, lay.CONTEXT] - 1.0)
    at = int(replica.requests[index, lay.CHAIN_AT])
    hit = 0
    while hit < most and replica.cached[replica.chains[at + hit]] & replica.bit:
        hit += 1
    return hit


@compiled_inline
def hold_blocks(replica, index, hit):
    """Hold the first `hit` blocks of a request's chain, all of which are cached."""
    at = int(replica.requests[index, lay.CHAIN_AT])
    for block in replica.chains[at : at + hit]:
        if replica.links[lay.HOLDERS, block] == 0:
            replica.row[lay.EVICTABLE] -= pages_per_block(replica.rules)
            if replica.real:
                _unlink(replica.links, block)
        if replica.real:
            replica.links[lay.HOLDERS, block] += 1


@compiled_inline
def register_blocks(replica, index, held, tokens, now):
    """Turn the pages of chained blocks within `tokens` into cached ones; return blocks held."""
    most = num_chained(replica, index, tokens)
    if not replica.real or most <= held:
        return held
    at = int(replica.requests[index, lay.CHAIN_AT])
    size = pages_per_block(replica.rules)
    for block in replica.chains[at + held : at + most]:
        if not replica.cached[block] & replica.bit:
            replica.cached[block] |= replica.bit
            replica.links[lay.HOLDERS, block] = 1
            # One that went since the last scrape was there at that scrape.
            if keeps_times(replica) and (
                replica.block_s[lay.WENT_S, block] <= replica.row[lay.SCRAPED_S]
            ):
                replica.block_s[lay.CAME_S, block] = now
            continue
        if replica.links[lay.HOLDERS, block] == 0:
            _unlink(replica.links, block)
            replica.row[lay.EVICTABLE] -= size
        replica.links[lay.HOLDERS, block] += 1
        replica.row[lay.FREE] += size
    return most


@compiled_inline
def release_pages(replica, index, held, pages):
    """Give back the pages of a sequence, of which the first `held` blocks may stay cached."""
    size = pages_per_block(replica.rules)
    replica.row[lay.FREE] += pages - held * size if held else pages
    if not replica.real:
        # As if nobody else held them.
        replica.row[lay.EVICTABLE] += held * size if held else 0.0
        return
    at = int(replica.requests[index, lay.CHAIN_AT])
    for k in range(held - 1, -1, -1):
        block = replica.chains[at + k]
        replica.links[lay.HOLDERS, block] -= 1
        if replica.links[lay.HOLDERS, block] == 0:
            _link_last(replica.links, block)
            replica.row[lay.EVICTABLE] += size
