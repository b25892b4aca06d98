import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
attention = pytest.importorskip("serve_app.engines.sharded.attention")

WIDTH = 8
LAYER = 3
KV_HEADS = 2
CACHE_TOKENS = 400

LENGTHS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 30)).map(lambda one: (one[0], sum(one))),
    min_size=1,
    max_size=8,
)
"""Of each sequence its queries and its keys, of which the last are the queries' own."""


class Cache:
    """Holds keys and values in places that are nobody's order, like pages of sequences."""

    def __init__(self):
        self.tokens = torch.randn(2, CACHE_TOKENS, KV_HEADS, WIDTH)
        self.plan = None

    def plan_of(self, layer, group, dtype, kwargs):
        assert layer == LAYER
        starts = (kwargs[name].tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
        self.plan = attention.make_plan(*starts, kwargs["read_index"][0], group, dtype)
        return self.plan

    def update(self, key, value, layer, kwargs):
        if not len(self.plan.read_index):
            return key, value
        key, value = self.tokens[:, self.plan.read_index].transpose(1, 2)
        return key[None], value[None]


class Layer:
    layer_idx = LAYER


def masked(query, key, value, lengths, group):
    """What transformers does: all with all, hidden by a mask."""
    mask = torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool)
    first_query = first_key = 0
    for queries, keys in lengths:
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        mask[first_query : first_query + queries, first_key : first_key + keys] = visible
        first_query, first_key = first_query + queries, first_key + keys
    key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    seen = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3
    )
    return seen.transpose(1, 2)


def attend(lengths, group, read_index, cache, key, value):
    starts = [torch.cumsum(torch.tensor([0, *column]), 0) for column in zip(*lengths, strict=True)]
    query = torch.randn(1, KV_HEADS * group, int(starts[0][-1]), WIDTH)
    out, weights = attention.attend(
        Layer(), query, key, value, None, scaling=0.3, cache=cache,
        cu_seq_lens_q=starts[0], cu_seq_lens_k=starts[1], read_index=[read_index],
    )  # fmt: skip
    assert weights is None
    return query, out


@given(lengths=LENGTHS, group=st.sampled_from([1, 3]))
@settings(deadline=None)
def test_each_sequence_sees_its_own_past_and_nothing_else(lengths, group):
    torch.manual_seed(0)
    num_queries, num_keys = (sum(column) for column in zip(*lengths, strict=True))
    cache, read_index = Cache(), torch.randperm(CACHE_TOKENS)[:num_keys]
    own = torch.randn(1, KV_HEADS, num_queries, WIDTH)
    query, out = attend(lengths, group, read_index, cache, own, own)
    key, value = cache.tokens[:, read_index].transpose(1, 2)
    torch.testing.assert_close(out, masked(query, key[None], value[None], lengths, group))


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=5))
@settings(deadline=None)
def test_prompts_that_are_whole_read_nothing_from_the_cache(counts):
    torch.manual_seed(0)
    lengths = [(num, num) for num in counts]
    key, value = torch.randn(2, 1, KV_HEADS, sum(counts), WIDTH)
    query, out = attend(lengths, 3, torch.empty(0, dtype=torch.long), Cache(), key, value)
    torch.testing.assert_close(out, masked(query, key, value, lengths, 3))


def test_sequences_that_decode_attend_in_few_calls():
    lengths = [20, 21, 40, 300, 31]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    plan = attention.make_plan([0, 1, 2, 3, 4, 5], starts, torch.arange(412), 3, torch.float32)
    assert [part.queries.tolist() for part in plan.parts] == [[0, 1, 4, 2], [3]]
    # What is read for length alone stays below as much again.
    assert sum(lengths) <= len(plan.read_index) < 2 * sum(lengths)


@pytest.mark.parametrize(
    ("counts", "lengths", "num_masks"),
    [([5, 1, 1, 1, 4], [20, 300, 31, 45, 61], 3), ([5, 6], [5, 6], 2)],
)
def test_a_plan_is_on_the_device_of_its_batch(counts, lengths, num_masks):
    """`meta` stands for a GPU. What stayed on the CPU would be copied again in every layer."""
    starts = [[0, *torch.tensor(some).cumsum(0).tolist()] for some in (counts, lengths)]
    num_read = sum(lengths) if counts != lengths else 0
    index = torch.empty(num_read, dtype=torch.long, device="meta")
    plan = attention.make_plan(*starts, index, 3, torch.float32)
    masks = [part.mask for part in plan.parts if part.mask is not None]
    held = [plan.read_index, *masks, *(part.queries for part in plan.parts)]
    assert len(masks) == num_masks
    assert {one.device.type for one in held} == {"meta"}
