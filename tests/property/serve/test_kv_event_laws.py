"""What the gateway believes to be cached, against a replica that says what it has."""

import struct
from collections import Counter
from itertools import count

import msgpack
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.serve.test_serve_replicas import PROFILE

from serve_app.gateway.kv_events import BlockEvents, adapter_number
from serve_app.gateway.replicas import Prompt, ReplicaTable
from tokenyard.routing.prefix_index import block_names

BLOCK_TOKENS = 2
MOST_BLOCKS = 6
PROMPTS = [[first] * 4 + [second] * 8 for first in range(2) for second in range(3)]
ADAPTER = "style"


class Engine:
    """A replica that has blocks, by all tokens up to their ends, and publishes what changes."""

    def __init__(self, kept_batches, as_maps, clock):
        self.blocks, self.as_maps, self.clock = Counter(), as_maps, clock
        self.numbers, self.kept, self.kept_batches = count(), [], kept_batches

    def store(self, prompt, num_blocks, again=False):
        """Store what is new of a prompt; or compute it again beside what is there, as vLLM does."""
        ends = range(BLOCK_TOKENS, (num_blocks + 1) * BLOCK_TOKENS, BLOCK_TOKENS)
        blocks = [tuple(prompt[:end]) for end in ends]
        new = [block for block in blocks if again or block not in self.blocks]
        self.blocks.update(new)
        if not new:
            return self.publish()
        parent = new[0][:-BLOCK_TOKENS]
        ids = [token for block in new for token in block[-BLOCK_TOKENS:]]
        fields = {
            "type": "BlockStored", "block_hashes": [*map(hash_of, new)],
            "parent_block_hash": hash_of(parent) if parent else None, "token_ids": ids,
            "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None,
            "extra_keys": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
            "what_comes_later": [1, {"a": 2}],
        }  # fmt: skip
        return self.publish(fields)

    def remove(self, num_blocks):
        """Evict blocks that others do not go on from, as engines do."""
        gone = []
        for _ in range(min(num_blocks, len(self.blocks))):
            gone.append(max(self.blocks, key=len))
            self.blocks -= Counter([gone[-1]])
        fields = {"type": "BlockRemoved", "block_hashes": [*map(hash_of, gone)], "medium": "GPU",
                  "group_idx": 0}  # fmt: skip
        return self.publish(fields)

    def change(self, what, prompt, num_blocks):
        if what == "clear":
            return self.clear()
        if what == "remove":
            return self.remove(num_blocks)
        return self.store(prompt, num_blocks, again=what == "copy")

    def clear(self):
        self.blocks.clear()
        return self.publish({"type": "AllBlocksCleared"})

    def publish(self, *events):
        time_s = float(next(self.clock))
        batch = {"ts": time_s, "events": [*events], "data_parallel_rank": 0}
        if not self.as_maps:
            batch = [time_s, [[*event.values()] for event in events], 0]
        self.kept.append((next(self.numbers), msgpack.packb(batch)))
        return self.kept[-1]

    def again(self, first):
        """What it sends again."""
        kept = self.kept[-self.kept_batches :] if self.kept_batches else []
        return [batch for batch in kept if batch[0] >= first]


def hash_of(block):
    return bytes(block) if len(block) % 4 else hash(block)


def a_replica():
    table = ReplicaTable((100.0, 10.0))
    return table, table.add("r", "pool", PROFILE, BLOCK_TOKENS, 0.0)


def believed(table):
    """Leading tokens of each prompt that count as cached."""
    index = table._prefixes[BLOCK_TOKENS]
    return [BLOCK_TOKENS * index.match_row(block_names(one, BLOCK_TOKENS), 0) for one in PROMPTS]


def really(blocks):
    found = []
    for prompt in PROMPTS:
        end = 0
        while end < len(prompt) and tuple(prompt[: end + BLOCK_TOKENS]) in blocks:
            end += BLOCK_TOKENS
        found.append(end)
    return found


def hear(events, engine, batch, replays):
    """Do what a subscriber does with a batch that has come."""
    if not events.take(*batch):
        if replays:
            for old in engine.again(events.next):
                events.take(*old, is_all=True)
            events.end_replay()
        events.take(*batch, is_all=True)


KINDS = ["store"] * 6 + ["remove"] * 3 + ["copy", "clear", "restart", "repeat", "blip"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, len(PROMPTS) - 1), st.integers(1, MOST_BLOCKS), st.booleans(),
    ), max_size=40,
)  # fmt: skip


@settings(max_examples=scaled(300))
@given(STEPS, st.sampled_from([0, 2, 1000]), st.booleans())
def test_the_index_has_the_replicas_blocks_or_none_whatever_is_lost(steps, kept_batches, as_maps):
    """Without replay no batches are kept; then, or where too few are, what is lost is lost."""
    clock, (table, replica) = count(), a_replica()
    engine, events = Engine(kept_batches, as_maps, clock), BlockEvents(replica)

    def connect():
        events.begin()
        assert believed(table) == [0] * len(PROMPTS)
        for old in engine.again(0):
            events.take(*old, is_all=True)
        if kept_batches:
            events.end_replay()

    def check(batch):
        hear(events, engine, batch, replays=kept_batches > 0)
        assert believed(table) == really(engine.blocks if events.is_complete else {})

    for what, number, num_blocks, is_lost in steps:
        if what == "restart":
            engine = Engine(kept_batches, as_maps, clock)
        if what in ("restart", "blip"):
            connect()
        elif what == "repeat":
            before = believed(table)
            assert all(events.take(*old) for old in engine.kept[: events.next])
            assert believed(table) == before
        else:
            batch = engine.change(what, PROMPTS[number], num_blocks)
            if not is_lost:
                check(batch)
                assert events.is_complete or (what != "clear" and kept_batches < 1000)
    check(engine.publish())


@settings(max_examples=scaled(100))
@given(STEPS)
def test_a_prompt_counts_as_cached_until_its_answer_ends_or_it_is_stored(steps):
    table, replica = a_replica()
    engine, events = Engine(1000, False, count()), BlockEvents(replica)
    events.end_replay()
    open_prompts = []
    for what, number, num_blocks, closes in steps:
        if what == "store":
            hear(events, engine, engine.store(PROMPTS[number], num_blocks), True)
        elif what == "clear":
            hear(events, engine, engine.clear(), True)
        elif closes and open_prompts:
            name, _ = open_prompts.pop(number % len(open_prompts))
            replica.in_flight.close(name, 2.0)
        else:
            name = f"{len(open_prompts)} {id(object())} {number} {num_blocks}"
            if name not in dict(open_prompts):
                replica.send(name, Prompt(PROMPTS[number]), 0, 1.0, 1.0)
                open_prompts.append((name, PROMPTS[number]))
        pending = {
            tuple(prompt[:end])
            for _, prompt in open_prompts for end in range(0, len(prompt) + 1, BLOCK_TOKENS)
        }  # fmt: skip
        assert believed(table) == really(pending | engine.blocks.keys())
    for name, _ in open_prompts:
        replica.in_flight.close(name, 3.0)
    assert believed(table) == really(engine.blocks)
    replica.follow_events(False)
    assert table._prefixes[BLOCK_TOKENS].num_blocks == 0


def test_a_replica_that_counts_from_0_again_is_forgotten_at_once():
    table, replica = a_replica()
    clock, events = count(), BlockEvents(replica)
    engine = Engine(0, False, clock)
    for prompt in PROMPTS:
        events.take(*engine.store(prompt, MOST_BLOCKS))
    again = Engine(0, False, clock)
    assert events.take(*again.store(PROMPTS[0], 1))
    assert events.is_complete
    assert believed(table) == really(again.blocks)


def test_blocks_of_adapters_images_and_salts_are_not_those_of_the_text():
    table, replica = a_replica()
    events, numbers = BlockEvents(replica), count()
    index, name = table._prefixes[BLOCK_TOKENS], adapter_number(ADAPTER)

    def tell(*event):
        batch = msgpack.packb([float(number := next(numbers)), [event]])
        assert events.take(number, batch)
        return believed(table)[0], index.match_row(block_names(PROMPTS[0], 2, name), 0) * 2

    ids = PROMPTS[0][:2]
    assert tell("BlockStored", [1], None, ids, 2, 7) == (0, 0)
    assert tell("BlockStored", [2], None, ids, 2, None, "GPU", None, [["salt"]]) == (0, 0)
    assert tell("BlockStored", [3], 2, ids, 2, None, "GPU", None, [None]) == (0, 0)
    assert tell("BlockStored", [4], None, ids, 2, None, "cpu", None) == (0, 0)
    sliding = (None, "GPU", None, None, 1, "sliding_window")
    assert tell("BlockStored", [5], None, ids, 2, *sliding) == (0, 0)
    assert tell("BlockStored", [6], None, ids, 2, 7, "GPU", ADAPTER, [[ADAPTER]]) == (0, 2)
    assert tell("BlockStored", [7], None, ids, 2, None, "GPU", None, [None]) == (2, 2)
    assert tell("BlockRemoved", [7], "CPU") == (2, 2)
    assert tell("BlockRemoved", [7], "GPU", 1) == (2, 2)
    assert tell("BlockRemoved", [6]) == (2, 0)
    assert tell("SomethingNew", [7]) == (2, 0)
    # A hash of the block's tokens alone, as older engines have it, does not tell what is removed.
    assert tell("BlockStored", [7], 7, PROMPTS[0][2:4], 2, None) == (0, 0)
    assert "hashes" in events.problem
    assert tell("AllBlocksCleared") == (0, 0)
    assert events.is_complete
    assert tell("BlockStored", [8], None, [1, 2, 3], 3, None) == (0, 0)
    assert "3 tokens" in events.problem
    assert not events.is_complete


SCRAPS = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(),
        st.text(), st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=12),
        st.dictionaries(
            st.sampled_from(["ts", "events", "type", "block_hashes", "token_ids"]), inner
        ),
    ),
    max_leaves=30,
)  # fmt: skip
EVENTS = st.tuples(
    st.floats(), st.lists(st.tuples(st.sampled_from(["BlockStored", "BlockRemoved"]),
                                    st.lists(st.integers(0, 3)), SCRAPS, SCRAPS, SCRAPS))
)  # fmt: skip


@settings(max_examples=scaled(400))
@given(st.one_of(st.binary(max_size=64), SCRAPS.map(msgpack.packb), EVENTS.map(msgpack.packb)),
       st.integers(0, 2**64 - 1), st.booleans())  # fmt: skip
def test_no_bytes_do_more_than_end_what_is_known(payload, number, is_next):
    table, replica = a_replica()
    clock = count()
    engine, events = Engine(1000, False, clock), BlockEvents(replica)
    events.take(*engine.store(PROMPTS[0], 3))
    before = believed(table)
    events.take(1 if is_next else number, payload, is_all=True)
    assert all(now <= then for now, then in zip(believed(table), before, strict=True)) or (
        events.is_complete  # It happened to say something.
    )
    events.begin()
    again = Engine(1000, True, clock)
    hear(events, again, again.store(PROMPTS[2], 4), True)
    assert believed(table) == really(again.blocks)


def test_a_batch_that_is_too_large_or_too_deep_is_not_read():
    _, replica = a_replica()
    events = BlockEvents(replica)
    for payload in (b"\xc6" + struct.pack(">I", 5 << 20) + bytes(5 << 20), b"\x91" * 100_000):
        events.begin()
        events.end_replay()
        assert events.take(0, payload)
        assert not events.is_complete
        assert events.problem


def test_names_go_on_from_a_parent_as_if_the_prompt_were_one():
    ids = np.random.default_rng(0).integers(0, 50_000, 64).tolist()
    names = block_names(ids, 4)
    for at in range(1, 16):
        assert block_names(ids[at * 4 :], 4, int(names[at - 1])).tolist() == names[at:].tolist()
