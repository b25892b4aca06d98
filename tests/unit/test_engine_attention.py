import pytest

torch = pytest.importorskip("torch")
attention = pytest.importorskip("serve_app.engines.attention")

WIDTH = 8


class Keys:
    """A cache that has the keys and values of all sequences, packed."""

    def __init__(self, key, value):
        self.packed = key, value

    def update(self, key, value, layer, kwargs):
        assert layer == 3
        return self.packed


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


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 7)],
        [(1, 7), (1, 1), (1, 20)],
        [(5, 5), (1, 9)],
        [(4, 11), (1, 3), (6, 6), (2, 30)],
    ],
)
def test_each_sequence_sees_its_own_past_and_nothing_else(group, lengths):
    torch.manual_seed(0)
    num_queries, num_keys = (sum(column) for column in zip(*lengths, strict=True))
    query = torch.randn(1, 2 * group, num_queries, WIDTH)
    key, value = torch.randn(2, 1, 2, num_keys, WIDTH)
    starts = [torch.cumsum(torch.tensor([0, *column]), 0) for column in zip(*lengths, strict=True)]

    class Layer:
        layer_idx = 3

    out, weights = attention.attend(
        Layer(), query, None, None, None, scaling=0.3, cache=Keys(key, value),
        cu_seq_lens_q=starts[0], cu_seq_lens_k=starts[1],
    )  # fmt: skip
    assert weights is None
    torch.testing.assert_close(out, masked(query, key, value, lengths, group))
