"""The prompts in flight at each replica, counted in KV blocks."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.layout import replica_of
from tokenyard.routing.simulator.batching_kernel.prefix_cache import num_chained
from tokenyard.routing.simulator.batching_kernel.queue import waiting_at


@compiled
def _add_prompt(replica, index, block_tokens, mark, marks):
    """Tokens of a prompt's blocks that are not marked yet, up to whole blocks; mark them."""
    context = replica.requests[index, lay.CONTEXT]
    size = replica.rules[lay.BLOCK_TOKENS]
    num = num_chained(replica, index, context)
    at = int(replica.requests[index, lay.CHAIN_AT])
    # What is in no shared block is the request's own.
    tokens = block_tokens * math.ceil((context - num * size) / block_tokens)
    for block in replica.chains[at : at + num]:
        if marks[block] != mark:
            marks[block] = mark
            tokens += size
    return tokens


@compiled
def prompt_blocks(fleet, copy, block_tokens, marks, out):
    """Different blocks of the prompts in flight at each replica, and of the current request.

    Its router counts what it sent itself, from the decision to the last token.

    Args:
        fleet: All arrays.
        copy: Which copy; a request waits to be placed there.
        block_tokens: Tokens of a block.
        marks: Zeros, shape (I + 1,); written to.
        out: Filled, shape (S,).
    """
    index = int(fleet.clock[copy, lay.CURRENT])
    requests, rules = fleet.requests[copy], fleet.rules
    router = requests[index, lay.ROUTER]
    for server in range(out.shape[0]):
        replica = replica_of(fleet, copy, server)
        row, mark = replica.row, server + 1
        tokens = _add_prompt(replica, index, block_tokens, mark, marks)
        waiting, prefilling = int(row[lay.WAITING]), int(row[lay.PREFILLING])
        for place in range(waiting + prefilling + int(row[lay.DECODING])):
            if place < waiting:
                at = waiting_at(row, rules, place) + lay.W_INDEX
            elif place < waiting + prefilling:
                at = int(rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * (place - waiting)
                at += lay.P_INDEX
            else:
                at = int(rules[lay.DECODE_AT])
                at += lay.DECODE_FIELDS * (place - waiting - prefilling) + lay.D_INDEX
            if requests[int(row[at]), lay.ROUTER] == router:
                tokens += _add_prompt(replica, int(row[at]), block_tokens, mark, marks)
        out[server] = math.ceil(tokens / block_tokens)
