"""The index of prefix blocks against dictionaries in the order of sending."""

from collections import OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.routing.prefix_index import PrefixIndex, block_names

BLOCK_TOKENS = 3
PROMPTS = st.builds(
    lambda start, shared, own, num: [start] * shared + [own] * num,
    st.integers(0, 2), st.integers(0, 30), st.integers(10, 13), st.integers(0, 30),
)  # fmt: skip
ROWS = st.sampled_from([0, 1, 63, 64, 130])
STEPS = st.lists(st.tuples(PROMPTS, ROWS, st.sampled_from(["send"] * 9 + ["forget"])), max_size=60)


class Dictionaries:
    """What each row was sent, the least recently sent first."""

    def __init__(self, capacities):
        self.capacities, self.sent = capacities, {row: OrderedDict() for row in capacities}

    def send(self, blocks, row):
        sent = self.sent[row]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self.capacities[row]:
            sent.popitem(last=False)

    def match(self, blocks, row):
        return next((i for i, one in enumerate(blocks) if one not in self.sent[row]), len(blocks))


@settings(max_examples=scaled(200))
@given(STEPS, st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_each_replica_holds_what_it_was_sent_last(steps, capacities):
    rows = dict(zip((0, 1, 63, 64, 130), capacities, strict=True))
    index, expected = PrefixIndex(), Dictionaries(rows)
    for prompt, row, what in steps:
        blocks = block_names(prompt, BLOCK_TOKENS)
        held = np.zeros(131, np.int64)
        index.match(blocks, BLOCK_TOKENS, held)
        known = {one: BLOCK_TOKENS * expected.match(blocks.tolist(), one) for one in rows}
        assert {one: held[one] for one in rows} == known
        assert held.sum() == sum(known.values())
        assert index.match_row(blocks, row) * BLOCK_TOKENS == known[row]
        if what == "forget":
            index.forget(row)
            expected.sent[row].clear()
        else:
            index.send(blocks, row, rows[row])
            expected.send(blocks.tolist(), row)
    for row in rows:
        index.forget(row)
    assert index.num_blocks == 0


def test_an_index_grows_and_shrinks_without_forgetting():
    index, rng = PrefixIndex(), np.random.default_rng(0)
    prompts = [block_names(rng.integers(0, 9, 400).tolist(), 2) for _ in range(60)]
    for number, blocks in enumerate(prompts):
        index.send(blocks, number % 3, 10_000)
    assert [index.match_row(one, i % 3) for i, one in enumerate(prompts)] == [200] * 60
    index.forget(0)
    expected = [200 * (i % 3 > 0) for i in range(60)]
    assert [index.match_row(one, i % 3) for i, one in enumerate(prompts)] == expected


@given(PROMPTS, PROMPTS, st.integers(1, 5))
def test_equal_names_are_equal_beginnings(one, other, block_tokens):
    names = block_names(one, block_tokens), block_names(other, block_tokens)
    assert [len(found) for found in names] == [len(ids) // block_tokens for ids in (one, other)]
    for end, (own, others) in enumerate(zip(*names, strict=False), start=1):
        same = one[: end * block_tokens] == other[: end * block_tokens]
        assert (own == others) == same


def test_blocks_of_one_prompt_have_different_names_whatever_its_tokens_are():
    for token in (0, 1, -1, 2**63 - 1):
        assert len(set(block_names([token] * 64, 2).tolist())) == 32


def test_names_of_what_is_no_token_are_names_all_the_same():
    large, negative = block_names([2**70, 1], 1), block_names([-1, 1], 1)
    assert len({*large.tolist(), *negative.tolist()}) == 4
