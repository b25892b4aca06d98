"""A rank's KV cache: requests that begin alike share blocks, and unused ones stay until needed.

transformers shares blocks by the hash of all tokens up to their end, and under pressure forgets all
that no request uses. Here the least lately used go, one by one, and of one request the last blocks
before the first, without which they cannot be found. Imported in the ranks' processes only.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    BlockLedger,
)
from transformers.generation.continuous_batching.requests import RequestState

from serve_app.engines.kv_events import BlockEvent
from serve_app.engines.sharded import attention


class LruLedger(BlockLedger):
    """Blocks by their content; those that no request uses are in the order of their last use."""

    events: list[BlockEvent] | None = None
    """How it has changed since somebody looked; None: nobody does."""

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Let a request's block go; False: it stays, as others use it or may."""
        block_hash = self.block_to_hash.get(block_id)
        is_free = bool(super().release(block_id, no_cache))
        if block_hash is not None and block_id not in self.block_to_hash:
            self.tell("BlockRemoved", [block_hash])
        return is_free

    def evict(self, num_blocks: int) -> list[int]:
        """Forget so many unused blocks, least lately used first, and return them."""
        evicted = list(islice(self.cached_blocks, num_blocks))
        hashes = [self.block_to_hash.pop(block) for block in evicted]
        for block, block_hash in zip(evicted, hashes, strict=True):
            del self.cached_blocks[block]
            del self.hash_to_block[block_hash]
        self.tell("BlockRemoved", hashes)
        return evicted

    def evict_cached_blocks(self) -> list[int]:
        """Forget all unused blocks, and return them."""
        return self.evict(len(self.cached_blocks))

    def reset(self) -> None:
        """Forget all blocks."""
        super().reset()
        self.tell("AllBlocksCleared")

    def tell(self, *event: Any) -> None:
        """Note a change, if somebody looks."""
        if self.events is not None:
            self.events.append(event)


class StageCache(PagedAttentionCache):
    """A paged cache for the layers and heads of this rank only."""

    first_layer = 0
    _plan: attention.BatchLayout | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for allocator in self.cache_allocators.values():
            allocator.ledger = LruLedger()

    def plan_of(self, layer: int, group: int, dtype: Any, kwargs: Any) -> attention.BatchLayout:
        """Return how the batch attends, with the read indices in the order of the plan."""
        if layer == self.first_layer or self._plan is None:
            self._plan = attention.make_plan(
                kwargs["cu_seq_lens_q"].tolist(),
                kwargs["cu_seq_lens_k"]["full_attention"].tolist(),
                kwargs["read_index"][0],
                group,
                dtype,
            )
        kwargs["read_index"] = [self._plan.read_index]
        return self._plan

    def update(self, key_states: Any, value_states: Any, layer_idx: int, kwargs: Any) -> Any:
        """Number the layers from this rank's first."""
        return super().update(key_states, value_states, layer_idx - self.first_layer, kwargs)

    def can_store_request_tokens(
        self, state: RequestState, request_len: int, dry_run: bool = False
    ) -> bool:
        """Allocate room for more tokens of a request, in place of unused blocks; False: no room."""
        for allocator in self.cache_allocators.values():
            new = allocator.needs_new_blocks(state.request_id, state.current_len(), request_len)
            in_sectors = self.pool.num_free_sectors * allocator.blocks_per_sector
            missing = new - int(self.pool.count_free_blocks(allocator.index) + in_sectors)
            if 0 < missing <= len(allocator.ledger.cached_blocks):
                self.pool.free_blocks(allocator.index, allocator.ledger.evict(missing))
        return bool(super().can_store_request_tokens(state, request_len, dry_run))

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Note the content of blocks; the original leaves out those of a request's last batch."""
        token_ids = state.initial_tokens + state.generated_tokens
        for name, num_blocks in complete_blocks.items():
            allocator = self.cache_allocators[name]
            ledger, num_known = allocator.ledger, len(allocator.ledger.hash_to_block)
            allocator.mark_complete_blocks(state.request_id, token_ids, num_blocks)
            if ledger.events is not None:
                table, size = allocator.block_table[state.request_id], allocator.tokens_per_page
                # In the order in which they were noted.
                for block_hash, block in islice(ledger.hash_to_block.items(), num_known, None):
                    at = table.index(block)
                    parent = ledger.block_to_hash[table[at - 1]] if at else None
                    ids = token_ids[at * size : (at + 1) * size]
                    ledger.tell("BlockStored", [block_hash], parent, ids, size, None)

    def take_events(self) -> list[BlockEvent]:
        """Return how the cache has changed since the last call, of which all is noted from then."""
        taken: list[BlockEvent] = []
        for allocator in self.cache_allocators.values():
            taken += allocator.ledger.events or ()
            allocator.ledger.events = []
        return taken

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Release the blocks of a request, the last ones first."""
        for allocator in self.cache_allocators.values():
            allocator.block_table.get(request_id, []).reverse()
        super().free_blocks(request_id, no_cache)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Share of the memory that no request holds, or bytes; unused blocks are free."""
        caches = self.cache_allocators.values()
        unused = sum(len(cache.ledger.cached_blocks) * cache.bytes_per_block for cache in caches)
        total = self.num_sectors * self.bytes_per_sector if relative else 1
        return float(super().compute_free_capacity(relative) + unused / total)
