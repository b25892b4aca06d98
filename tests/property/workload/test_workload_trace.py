"""Laws of cutting and stretching, for any trace."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.workload.trace import Trace


@st.composite
def traces(draw, min_size=1):
    gaps = draw(st.lists(st.floats(0, 100), min_size=min_size, max_size=40))
    arrival_s = np.cumsum([0.0, *gaps[1:]])
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    lengths = rng.integers(0, 9000, (2, len(arrival_s)))
    return Trace(arrival_s, lengths[0], lengths[1])


def long_traces():
    return traces(min_size=2).filter(lambda trace: trace.duration_s > 1e-3)


@given(traces(), st.integers(1, 10))
def test_windows_partition_the_requests_in_order(trace, count):
    if count > trace.num_requests:
        with pytest.raises(ValueError, match="cannot cut"):
            trace.windows(count)
        return
    windows = trace.windows(count)

    size = trace.num_requests // count
    contexts = np.concatenate([window.context_tokens for window in windows])
    assert {window.num_requests for window in windows} == {size}
    assert contexts.tolist() == trace.context_tokens[: count * size].tolist()
    assert all(window.arrival_s[0] == 0 for window in windows)


@given(traces(), st.data())
def test_head_and_tail_are_the_whole_with_all_gaps_but_the_one_at_the_cut(trace, data):
    num_train = data.draw(st.integers(1, trace.num_requests))
    train, test = trace.split(num_train)

    gaps = np.concatenate((np.diff(train.arrival_s), np.diff(test.arrival_s)))
    expected = np.delete(np.diff(trace.arrival_s), num_train - 1 if test.num_requests else [])
    np.testing.assert_allclose(gaps, expected, atol=1e-9)


@given(long_traces(), st.floats(0.01, 100))
def test_rescaling_to_a_rate_gives_that_rate(trace, target):
    assert trace.with_rate(target).mean_rate_per_s == pytest.approx(target)


@given(long_traces(), st.floats(0.01, 100))
def test_rescaling_there_and_back_changes_nothing(trace, factor):
    back = trace.rescaled(factor).rescaled(1 / factor)

    np.testing.assert_allclose(back.arrival_s, trace.arrival_s, rtol=1e-12, atol=1e-300)


def num_shared(one, other):
    """Leading entries that are equal."""
    for count, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return count
    return min(len(one), len(other))


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 90)), min_size=2),
    st.integers(1, 20),
    st.integers(1, 50),
)
def test_blocks_of_another_size_share_the_same_tokens_rounded_down(prompts, size, block_tokens):
    told, contexts = zip(*((tuple(hashes), context) for hashes, context in prompts), strict=True)
    n = len(prompts)
    trace = Trace(
        np.zeros(n), np.array(contexts), np.zeros(n, np.int64),
        prefix_hashes=told, prefix_block_tokens=size,
    ).with_prefix_blocks(block_tokens)  # fmt: skip
    assert trace.prefix_block_tokens == block_tokens
    if block_tokens == size:
        assert trace.prefix_hashes == told
        return
    known = [min(len(hashes) * size, context) for hashes, context in prompts]
    for i in range(n):
        assert len(trace.prefix_hashes[i]) == known[i] // block_tokens
        for j in range(i):
            shared = min(num_shared(told[i], told[j]) * size, known[i], known[j])
            ours = num_shared(trace.prefix_hashes[i], trace.prefix_hashes[j])
            assert ours == shared // block_tokens
