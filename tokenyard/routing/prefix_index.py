"""Which blocks of prompts a router believes to be cached where.

A block is named by all tokens up to its end, so equal names mean equal beginnings. An index keeps,
per replica, the blocks that were sent there last, as many as fit into its memory; or else those
that the replica says it has stored, and those of prompts that are on their way. All of it is
arrays that compiled code reads: two hash tables with open addressing (Knuth, The Art of Computer
Programming, volume 3, section 6.4, algorithms L and R) and a list of blocks per replica.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.types import IntArray

Slots = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint64]
_WORD_BITS = 64
_ONE = np.uint64(1)
_FIRST_ENTRIES = 1024
_MOST_TOKEN = 2**63
# Odd numbers with well mixed bits, those of xxHash.
_MIX_TOKEN = np.uint64(0x9E3779B185EBCA87)
_MIX_KEY = np.uint64(0xC2B2AE3D27D4EB4F)
_ROOT = int(_MIX_KEY.astype(np.int64))

# Columns of the links of a holding, which stands for a block at a replica.
_OLDER, _NEWER, _REASONS, _NUM_LINKS = range(4)
# Columns of the ends of a replica's list.
_OLDEST, _NEWEST, _NUM_HELD, _NUM_ENDS = range(4)
# What is counted of entries of either table.
_NUM_USED, _FIRST_FREE, _NUM_EVER = range(3)
_NOBODY = -1
# Why a row has a block: how many prompts with it are on their way, and whether it is stored; or
# that it was sent there lately.
SENT, ENDED = 1, -1
STORED, REMOVED = 1 << 30, -(1 << 30)
_RECENT = 0
_NO_BLOCKS: IntArray = np.zeros(0, np.int64)
WHOLE_PROMPT = 0
"""What blocks without a parent go on from."""


def block_names(
    token_ids: Sequence[int], block_tokens: int, parent: int = WHOLE_PROMPT
) -> IntArray:
    """Name the whole blocks of a prompt, each by all tokens up to its end.

    Args:
        token_ids: Of the prompt; any integers.
        block_tokens: Tokens of one block, at least 1.
        parent: Name of the block that they go on from; or a number of what else they depend on.

    Returns:
        The same names in every process, shape (num_blocks,).
    """
    names = np.empty(len(token_ids) // block_tokens, np.int64)
    # From 0, tokens of 0 would not change it.
    _name_blocks(_as_array(token_ids), block_tokens, parent or _ROOT, names)
    return names


def _as_array(token_ids: Sequence[int]) -> IntArray:
    num = len(token_ids)
    try:
        # Half of what numpy takes to read a list.
        packed = struct.pack(f"{num}q", *token_ids)
    except struct.error:  # A caller wrote what is no token of any model.
        packed = struct.pack(f"{num}q", *(token_id % _MOST_TOKEN for token_id in token_ids))
    return np.frombuffer(packed, np.int64)


@compiled
def _name_blocks(token_ids: IntArray, block_tokens: int, parent: int, names: IntArray) -> None:
    mixed = np.uint64(parent)
    for block in range(names.shape[0]):
        for at in range(block * block_tokens, (block + 1) * block_tokens):
            mixed = (mixed ^ np.uint64(token_ids[at])) * _MIX_TOKEN
            mixed ^= mixed >> np.uint64(29)
        names[block] = np.int64(mixed)


@compiled_inline
def _home(key: int, mask: int) -> int:
    """Where a key stands in a table, unless others stand there."""
    mixed = np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _MIX_KEY
    return int(mixed >> np.uint64(32)) & mask


@compiled
def _find(slots: Slots, keys: IntArray, key: int) -> int:
    """Slot of a key, or the free one where it belongs. A slot has an entry's number plus one."""
    mask = slots.shape[0] - 1
    at = _home(key, mask)
    while slots[at] != 0 and keys[slots[at] - 1] != key:
        at = (at + 1) & mask
    return at


@compiled
def _clear(slots: Slots, keys: IntArray, at: int) -> None:
    """Free a slot, and move those behind it that could not be found any more."""
    mask = slots.shape[0] - 1
    free = at
    at = (at + 1) & mask
    while slots[at] != 0:
        home = _home(keys[slots[at] - 1], mask)
        if ((at - home) & mask) >= ((at - free) & mask):
            slots[free] = slots[at]
            free = at
        at = (at + 1) & mask
    slots[free] = 0


@compiled
def _take(counts: IntArray, keys: IntArray, key: int) -> int:
    """Give a key an entry; free ones are a list through their keys."""
    entry = int(counts[_FIRST_FREE])
    if entry == _NOBODY:
        entry = int(counts[_NUM_EVER])
        counts[_NUM_EVER] += 1
    else:
        counts[_FIRST_FREE] = keys[entry]
    counts[_NUM_USED] += 1
    keys[entry] = key
    return entry


@compiled
def _give_back(counts: IntArray, keys: IntArray, entry: int) -> None:
    keys[entry] = counts[_FIRST_FREE]
    counts[_FIRST_FREE] = entry
    counts[_NUM_USED] -= 1


@compiled
def _move_slots(slots: Slots, keys: IntArray, larger: Slots) -> None:
    for at in range(slots.shape[0]):
        if slots[at] != 0:
            larger[_find(larger, keys, keys[slots[at] - 1])] = slots[at]


@compiled
def _unlink(links: Slots, end: IntArray, entry: int) -> None:
    older, newer = links[entry, _OLDER], links[entry, _NEWER]
    if older == _NOBODY:
        end[_OLDEST] = newer
    else:
        links[older, _NEWER] = newer
    if newer == _NOBODY:
        end[_NEWEST] = older
    else:
        links[newer, _OLDER] = older


@compiled
def _append(links: Slots, end: IntArray, entry: int) -> None:
    newest = end[_NEWEST]
    links[entry, _OLDER], links[entry, _NEWER] = newest, _NOBODY
    if newest == _NOBODY:
        end[_OLDEST] = entry
    else:
        links[newest, _NEWER] = entry
    end[_NEWEST] = entry


@compiled
def _drop(
    row: int, entry: int,
    block_counts: IntArray, names: IntArray, block_slots: Slots, holders: Bits,
    held_counts: IntArray, held: IntArray, held_slots: Slots, links: Slots, ends: IntArray,
) -> None:  # fmt: skip
    """Drop one holding of a row."""
    word, bit = row // _WORD_BITS, _ONE << np.uint64(row % _WORD_BITS)
    key = held[entry]
    block = key >> 32
    _unlink(links, ends[row], entry)
    ends[row, _NUM_HELD] -= 1
    _clear(held_slots, held, _find(held_slots, held, key))
    _give_back(held_counts, held, entry)
    holders[block, word] &= ~bit
    if not holders[block].any():
        _clear(block_slots, names, _find(block_slots, names, names[block]))
        _give_back(block_counts, names, block)


@compiled
def _hold(
    blocks: IntArray, row: int, reason: int, most: int,
    block_counts: IntArray, names: IntArray, block_slots: Slots, holders: Bits,
    held_counts: IntArray, held: IntArray, held_slots: Slots, links: Slots, ends: IntArray,
) -> None:  # fmt: skip
    """Add a reason for a row to have blocks, or take one away; what has none left is dropped.

    Of blocks that were sent lately, no more than `most` are kept.
    """
    word, bit = row // _WORD_BITS, _ONE << np.uint64(row % _WORD_BITS)
    end = ends[row]
    for i in range(blocks.shape[0]):
        at = _find(block_slots, names, blocks[i])
        if block_slots[at] == 0:
            if reason < 0:
                continue
            block_slots[at] = _take(block_counts, names, blocks[i]) + 1
            holders[block_slots[at] - 1] = 0
        block = block_slots[at] - 1
        key = (block << 32) | row
        at = _find(held_slots, held, key)
        if held_slots[at] == 0:
            if reason < 0:
                continue
            held_slots[at] = _take(held_counts, held, key) + 1
            links[held_slots[at] - 1, _REASONS] = 0
            holders[block, word] |= bit
            end[_NUM_HELD] += 1
            _append(links, end, held_slots[at] - 1)
        elif reason == _RECENT:
            _unlink(links, end, held_slots[at] - 1)
            _append(links, end, held_slots[at] - 1)
        if reason == _RECENT:
            continue
        entry = held_slots[at] - 1
        if reason == STORED:
            links[entry, _REASONS] |= STORED
        elif reason == REMOVED:
            links[entry, _REASONS] &= ~STORED
        elif reason == SENT or links[entry, _REASONS] & ~STORED:
            links[entry, _REASONS] += reason
        if reason < 0 and links[entry, _REASONS] == 0:
            _drop(
                row, entry, block_counts, names, block_slots, holders,
                held_counts, held, held_slots, links, ends,
            )  # fmt: skip
    while reason == _RECENT and end[_NUM_HELD] > most:
        _drop(
            row, end[_OLDEST], block_counts, names, block_slots, holders,
            held_counts, held, held_slots, links, ends,
        )  # fmt: skip


@compiled
def _match(
    names: IntArray, slots: Slots, holders: Bits, blocks: IntArray, block_tokens: int,
    left: Bits, out: IntArray,
) -> None:  # fmt: skip
    """Write how many leading tokens each row holds, where it holds any.

    Args:
        names: Keys of the table of blocks.
        slots: Its slots.
        holders: Rows that hold each block, as bits, shape (num_entries, num_words).
        blocks: Names, leading first, shape (num_blocks,).
        block_tokens: Tokens of one block.
        left: Overwritten, shape (num_words,).
        out: Shape (num_rows,).
    """
    for word in range(left.shape[0]):
        left[word] = ~np.uint64(0)
    for num in range(blocks.shape[0]):
        entry = slots[_find(slots, names, blocks[num])] - 1
        kept = np.uint64(0)
        for word in range(left.shape[0]):
            now = left[word] & holders[entry, word] if entry >= 0 else np.uint64(0)
            if num > 0 and now != left[word]:
                _tell(left[word] ^ now, word, num * block_tokens, out)
            left[word] = now
            kept |= now
        if kept == 0:
            return
    if blocks.shape[0] > 0:
        for word in range(left.shape[0]):
            _tell(left[word], word, blocks.shape[0] * block_tokens, out)


@compiled
def _tell(rows: np.uint64, word: int, tokens: int, out: IntArray) -> None:
    row = word * _WORD_BITS
    while rows != 0:
        if rows & _ONE:
            out[row] = tokens
        rows >>= _ONE
        row += 1


class _Table:
    """A hash table from 64-bit keys to entries, which are rows of arrays."""

    def __init__(self) -> None:
        self.counts: IntArray = np.array([0, _NOBODY, 0])
        self.keys: IntArray = np.zeros(_FIRST_ENTRIES, np.int64)
        self.slots: Slots = np.zeros(2 * _FIRST_ENTRIES, np.int32)

    def make_room(self, num: int) -> None:
        """Grow where so many more keys do not fit."""
        needed = int(self.counts[_NUM_USED]) + num
        if needed <= len(self.keys):
            return
        size = len(self.keys)
        while size < needed:
            size *= 2
        self.keys = _longer(self.keys, size)
        slots: Slots = np.zeros(2 * size, np.int32)
        _move_slots(self.slots, self.keys, slots)
        self.slots = slots


class PrefixIndex:
    """Blocks that were sent to replicas; of each, the least recently sent are forgotten.

    Replicas have numbers, which are rows of whoever asks. Not thread-safe.
    """

    def __init__(self) -> None:
        self._blocks, self._held = _Table(), _Table()
        self._holders: Bits = np.zeros((_FIRST_ENTRIES, 1), np.uint64)
        """Rows that hold each block, as bits."""
        self._links: Slots = np.zeros((_FIRST_ENTRIES, _NUM_LINKS), np.int32)
        self._ends = _no_ends(_WORD_BITS)
        self._left: Bits = np.zeros(1, np.uint64)
        # Loads what is compiled, or the first decision would wait for it.
        self.send(block_names([0], 1), row=0, capacity_blocks=0)
        self.match(block_names([0], 1), 1, np.zeros(1, np.int64))

    @property
    def num_blocks(self) -> int:
        """Different blocks that any replica holds."""
        return int(self._blocks.counts[_NUM_USED])

    def match(self, blocks: IntArray, block_tokens: int, out: IntArray) -> None:
        """Write how many leading tokens of a prompt each row holds, where it holds any.

        Args:
            blocks: Names of the prompt's blocks, leading first, shape (num_blocks,).
            block_tokens: Tokens of one block.
            out: Filled where it is not 0, tokens, shape (num_rows,).
        """
        known = self._blocks
        _match(known.keys, known.slots, self._holders, blocks, block_tokens, self._left, out)

    def send(self, blocks: IntArray, row: int, capacity_blocks: int) -> None:
        """Note blocks that were sent to a row, which holds no more than its capacity.

        Args:
            blocks: Their names, leading first, shape (num_blocks,).
            row: Number of the replica, from 0.
            capacity_blocks: Most that it holds.
        """
        self._make_room(len(blocks), row)
        _hold(blocks, row, _RECENT, capacity_blocks, *self._arrays())

    def hold(self, blocks: IntArray, row: int, reason: int) -> None:
        """Note why a row has blocks, or has them no longer.

        `SENT` and `ENDED` are of a prompt on its way, and count; `STORED` and `REMOVED` are said by
        the replica, and do not. A row that is told this is sent nothing by `send`.
        """
        self._make_room(len(blocks) if reason > 0 else 0, row)
        _hold(blocks, row, reason, 0, *self._arrays())

    def match_row(self, blocks: IntArray, row: int) -> int:
        """How many leading blocks one row is believed to hold."""
        held: IntArray = np.zeros(max(len(self._ends), row + 1), np.int64)
        self.match(blocks, 1, held)
        return int(held[row])

    def forget(self, row: int) -> None:
        """Forget all that was sent to a row."""
        if row < len(self._ends):
            _hold(_NO_BLOCKS, row, _RECENT, 0, *self._arrays())

    def _arrays(self) -> tuple[Any, ...]:
        blocks, held = self._blocks, self._held
        return (
            blocks.counts, blocks.keys, blocks.slots, self._holders,
            held.counts, held.keys, held.slots, self._links, self._ends,
        )  # fmt: skip

    def _make_room(self, num_blocks: int, row: int) -> None:
        self._blocks.make_room(num_blocks)
        self._held.make_room(num_blocks)
        num_words = max(row // _WORD_BITS + 1, len(self._left))
        if len(self._left) < num_words:
            added = num_words - len(self._left)
            self._holders = np.pad(self._holders, ((0, 0), (0, added)))
            self._ends = np.vstack([self._ends, _no_ends(added * _WORD_BITS)])
            self._left = np.zeros(num_words, np.uint64)
        if len(self._holders) < len(self._blocks.keys):
            self._holders = _longer(self._holders, len(self._blocks.keys))
        if len(self._links) < len(self._held.keys):
            self._links = _longer(self._links, len(self._held.keys))


def _no_ends(num_rows: int) -> IntArray:
    ends: IntArray = np.zeros((num_rows, _NUM_ENDS), np.int64)
    ends[:, [_OLDEST, _NEWEST]] = _NOBODY
    return ends


def _longer(array: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    longer = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
