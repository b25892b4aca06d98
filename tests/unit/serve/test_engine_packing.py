import pytest

torch = pytest.importorskip("torch")
packed = pytest.importorskip("serve_app.engines.sharded.packing")

if not torch.backends.mkldnn.is_available():
    pytest.skip("no oneDNN", allow_module_level=True)


class Head(torch.nn.Module):
    """An embedding that is also the head, behind a layer with a bias and a small one."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 256)
        self.up = torch.nn.Linear(256, 512)
        self.small = torch.nn.Linear(512, 16, bias=False)
        self.down = torch.nn.Linear(16, 256, bias=False)
        self.head = torch.nn.Linear(256, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(self.small(self.up(self.embed(ids)))))


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (2, 40)])
def test_packed_layers_multiply_like_plain_ones(shape):
    torch.manual_seed(0)
    model, ids = Head().eval(), torch.randint(0, 1000, shape)
    with torch.no_grad():
        plain = model(ids)
        packed.pack_linears(model)
        torch.testing.assert_close(model(ids), plain, rtol=1e-4, atol=1e-5)
    is_packed = {name for name, weight in model.named_parameters() if weight.is_mkldnn}
    assert is_packed == {"up.weight", "head.weight"}
