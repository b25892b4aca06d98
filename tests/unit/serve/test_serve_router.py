"""What the router of any deployment reads of the requests that it places."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.router import PolicyRequestRouter

IDS = list(range(1000, 1300))


@dataclass
class Body:
    """A request as somebody's own deployment may take it."""

    prompt: object


@pytest.mark.parametrize(
    ("argument", "num_tokens"),
    [
        ({"prompt": "a" * 400}, 100), ({"prompt": ["a" * 400]}, 100), ({"prompt": IDS}, 300),
        ({"token_ids": IDS}, 300), ({"token_ids": None, "prompt": IDS}, 300), (Body(IDS), 300),
        ({"prompt": ""}, 1), ({"prompt": []}, 1), ({"other": "x"}, 1), ("hello", 1),
    ],
)  # fmt: skip
def test_a_prompt_counts_in_every_shape_that_openais_api_has(argument, num_tokens):
    router = object.__new__(PolicyRequestRouter)  # Serve makes them, within a deployment.
    router._tokenizer = EstimatingTokenizer()
    for pending in (
        SimpleNamespace(args=[argument], kwargs={}),
        SimpleNamespace(args=[], kwargs={"request": argument}),
    ):
        assert len(router._token_ids(pending)) == num_tokens
