"""How long prompts are believed to be, of any body, and how answers correct that."""

import base64
import io
import json
import random
import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from unit.serve.test_serve_external import pools_metric, run
from unit.stub_endpoint import DONE, an_event

from serve_app.cluster import EngineProfile
from serve_app.engines.tokenizer import EstimatedTokens
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.gateway.sse import peek_whole, prompt_tokens_of
from serve_app.http.image_tokens import formula_of, size_of
from serve_app.http.prompt_size import PromptSize, PromptTokens

DOCS = Path(__file__).parents[3] / "docs"
WORDS = "word " * 1000
"""About 1000 tokens."""


def tokens(fields, model="m"):
    counts = PromptTokens(formula_of(model))
    return counts.estimate(PromptSize(fields, counts.images).expected)


def a_chat(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": WORDS}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": WORDS}}}
LONG = {
    "prompt": {"prompt": WORDS},
    "prompts": {"prompt": [WORDS[:2500], WORDS[:2500]]},
    "content": {"messages": [{"role": "user", "content": WORDS}]},
    "parts": a_chat({"type": "text", "text": WORDS}),
    "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
    "functions": {"functions": [{"name": "f", "parameters": SCHEMA}]},
    "tool calls": {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    "function call": {"messages": [{"role": "assistant", "function_call": CALL["function"]}]},
    "tool results": {"messages": [{"role": "tool", "tool_call_id": "1", "content": WORDS}]},
    "reasoning": {"messages": [{"role": "assistant", "content": "", "reasoning": WORDS}]},
    "reasoning_content": {"messages": [{"role": "assistant", "reasoning_content": WORDS}]},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_grammar": {"guided_grammar": WORDS},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "a field that nobody knows": {"messages": [{"role": "assistant", "audio_text": [WORDS]}]},
    "Anthropic's system": {"system": [{"type": "text", "text": WORDS}], "messages": []},
    "Anthropic's tools": {"tools": [{"name": "f", "input_schema": SCHEMA}]},
    "tool_use": a_chat({"type": "tool_use", "id": "1", "name": "f", "input": {"a": [WORDS]}}),
    "tool_result": a_chat({"type": "tool_result", "content": [{"type": "text", "text": WORDS}]}),
    "thinking": a_chat({"type": "thinking", "thinking": WORDS, "signature": WORDS}),
    "document": a_chat({"type": "document", "source": {"type": "text", "data": WORDS}}),
    "input": {"input": WORDS},
    "instructions": {"instructions": WORDS, "input": "a"},
    "input_text": {"input": [{"role": "user", "content": [{"type": "input_text", "text": WORDS}]}]},
    "function_call": {"input": [{"type": "function_call", "call_id": "1", "arguments": WORDS}]},
    "function_call_output": {"input": [{"type": "function_call_output", "output": WORDS}]},
    "reasoning item": {"input": [{"type": "reasoning", "summary": [{"text": WORDS}]}]},
    "text.format": {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "documents": {"query": "a", "documents": [WORDS[:2500], {"text": WORDS[:2500]}]},
    "score": {"text_1": "a", "text_2": [WORDS]},
    "token ids": {"prompt": [[7] * 500, [7] * 500]},
}


@pytest.mark.parametrize("name", LONG)
def test_all_that_becomes_a_prompt_counts(name):
    assert tokens(LONG[name]) == pytest.approx(1000, rel=0.15)


def test_what_becomes_no_prompt_counts_nothing():
    sound = {"type": "input_audio", "input_audio": {"data": WORDS, "format": "wav"}}
    paper = {"type": "file", "file": {"file_data": WORDS}}
    scan = {"type": "document", "source": {"type": "base64", "data": WORDS}}
    for fields in (
        a_chat(sound, paper, scan, {"type": "text", "text": "a", "cache_control": {"type": WORDS}}),
        {"messages": [{"role": "user", "content": "a", "id": WORDS}], "user": WORDS},
        {"prompt": "a", "metadata": {"a": WORDS}, "stop": [WORDS], "reasoning": {"effort": WORDS}},
    ):
        assert tokens(fields) < 20


def test_bodies_that_make_no_sense_are_measured_too():
    deep = "a"
    for _ in range(200):
        deep = {"content": [deep]}
    for value in (None, 5, [], [None], {}, [[]], deep, [deep], [1, "a"], {"type": []}, {"role": 5}):
        for name in ("messages", "prompt", "input", "tools", "system", "text", "response_format"):
            assert tokens({name: value}) < 2000
    odd = [{"type": "image_url", "image_url": one} for one in (None, 5, {}, {"url": 5}, "data:,ä")]
    assert tokens(a_chat(*odd)) == pytest.approx(5 * 1371, abs=20)


def test_letters_beyond_ascii_are_not_four_to_a_token():
    assert tokens({"prompt": "世" * 4000}) == pytest.approx(2800, rel=0.1)
    assert tokens({"prompt": "привет " * 500}) == pytest.approx(1500, rel=0.1)
    assert tokens({"prompt": "\ud800"}) >= 1


# A tokenizer and a template as models have them: pieces of words, and each mark and digit.
PIECES = re.compile(r" ?[A-Za-z]{1,6}|\s+|\d|[^\sA-Za-z\d]{1,2}")
PROSE = "".join(path.read_text() for path in sorted(DOCS.glob("*.md")))


class Traffic:
    """Bodies of some kinds, with text cut from the documentation."""

    def __init__(self, seed, unread=()):
        self.rng, self.unread = random.Random(seed), unread

    def text(self, least, most):
        at, size = self.rng.randrange(len(PROSE) - most), self.rng.randrange(least, most)
        return PROSE[at : at + size]

    def schema(self):
        names = "abcdefg"[: self.rng.randrange(1, 7)]
        fields = {one * 3: {"type": "string", "description": self.text(10, 90)} for one in names}
        return {"type": "object", "properties": fields}

    def body(self, kind):
        rng = self.rng
        messages = [{"role": "user", "content": self.text(30, 1500)} for _ in range(3)]
        body = {"messages": messages}
        if kind in ("tools", "calls"):
            body["tools"] = [
                {"type": "function", "function": {"name": "f", "parameters": self.schema()}}
                for _ in range(rng.randrange(1, 12))
            ]
        if kind == "calls":
            for _ in range(rng.randrange(1, 5)):
                arguments = json.dumps({"path": self.text(5, 50), "text": self.text(50, 2000)})
                call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                messages.append({"role": "tool", "content": self.text(10, 900)})
        if kind == "reasoning":
            messages[1] = {"role": "assistant", "content": "a", "reasoning": self.text(50, 5000)}
        if kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": self.schema()}
        return body

    def count(self, body):
        """What the model's server would count."""
        pieces = ["<system>You are a helpful assistant."]
        pieces += [json.dumps(one) for one in body.get("tools", ())]
        if "tools" in body:
            pieces.append("You may call these functions. Answer with JSON in tool_call tags. " * 5)
        if "schema" not in self.unread:
            pieces.append(json.dumps(body.get("response_format", "")))
        for one in body["messages"]:
            pieces += ["<|" + one["role"] + "|>", one["content"] or "", "<|end|>"]
            if "reasoning" not in self.unread:
                pieces.append(one.get("reasoning", ""))
            for call in one.get("tool_calls", ()):
                pieces += ["<tool_call>f", call["function"]["arguments"]]
        return sum(len(PIECES.findall(one)) for one in pieces)


@pytest.mark.parametrize("unread", [(), ("schema",), ("schema", "reasoning")])
def test_after_50_answers_prompts_of_every_kind_are_known_within_5_percent(unread):
    traffic, counts = Traffic(0, unread), PromptTokens(formula_of("m"))
    kinds = ("plain", "tools", "calls", "reasoning", "schema")

    def ask(kind):
        body = traffic.body(kind)
        expected = PromptSize(body, counts.images).expected
        return expected, traffic.count(body)

    def teach(expected, number):
        counts.learn(expected, counts.estimate(expected), number)

    for number in range(50):
        teach(*ask(kinds[number % 5]))
    for kind in kinds:
        asked = [ask(kind) for _ in range(400)]
        errors = [abs(counts.estimate(expected) / number - 1) for expected, number in asked]
        assert statistics.median(errors) < 0.05, kind


def test_answers_that_say_nothing_or_something_odd_change_little():
    traffic, counts = Traffic(1), PromptTokens(formula_of("m"))
    for _ in range(100):
        body = traffic.body("plain")
        expected = PromptSize(body, counts.images).expected
        counts.learn(expected, counts.estimate(expected), traffic.count(body))
    before = counts.estimate(expected)
    counts.learn(expected, before, 0)
    assert counts.estimate(expected) == before
    for odd in (1, 10**9):
        counts.learn(expected, before, odd)
        assert counts.estimate(expected) == pytest.approx(before, rel=0.3)


def an_image(width, height, kind, **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}), ("GIF", {}), ("JPEG", {}), ("JPEG", {"progressive": True}),
        ("JPEG", {"exif": b"Exif\0\0" + b"x" * 60_000}), ("WEBP", {}), ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0"}),
    ],
)  # fmt: skip
def test_an_image_says_its_size_in_its_head(kind, options):
    data = an_image(301, 203, kind, **options)
    assert size_of(data) == size_of(f"data:image/{kind.lower()};base64,{data}") == (301, 203)


def test_images_without_a_size_have_the_usual_one():
    for url in ("https://a/b.png", "data:image/png;base64," + "A" * 400, "data:,", "", "data:;é"):
        assert size_of(url) == (1024, 1024)


@pytest.mark.parametrize(
    ("model", "size", "detail", "published"),
    [
        # The examples of OpenAI's, Qwen's and Anthropic's documentation.
        ("gpt-4o", (1024, 1024), "high", 765),
        ("gpt-4o", (2048, 4096), "high", 1105),
        ("gpt-4o", (4096, 8192), "low", 85),
        ("gpt-4o-mini", (1024, 1024), "auto", 2833 + 4 * 5667),
        ("gpt-5", (1024, 1024), "high", 630),
        ("Qwen/Qwen2-VL-7B-Instruct", (1120, 1120), "low", 1600),
        ("Qwen/Qwen2.5-VL-7B-Instruct", (20_000, 20_000), "auto", 16_384),
        ("Qwen/Qwen3-VL-8B", (640, 640), "auto", 400),
        ("claude-sonnet-4-5", (1000, 1000), None, 1334),
        ("claude-sonnet-4-5", (4000, 4000), None, 1600),
    ],
)
def test_images_take_what_their_models_makers_have_published(model, size, detail, published):
    count = formula_of(model)
    assert count(*size, detail == "low") == pytest.approx(published, rel=0.01)
    if max(size) < 2000:
        data = an_image(*size, "PNG")
        url = f"data:image/png;base64,{data}"
        for part in (
            {"type": "image_url", "image_url": {"url": url, "detail": detail}},
            {"type": "input_image", "image_url": url, "detail": detail},
            {"type": "image", "source": {"type": "base64", "data": data}, "detail": detail},
        ):
            assert tokens(a_chat(part), model) == pytest.approx(published, rel=0.15)


def test_sizes_that_no_image_has_are_counted_with_a_bound():
    for model in ("gpt-4o", "qwen", "claude", "qwen3"):
        for size in ((1, 1), (2**32 - 1, 1), (1, 2**32 - 1), (2**32 - 1, 2**32 - 1)):
            assert 0 <= formula_of(model)(*size, False) <= 33_000


def test_usage_tells_of_the_prompt_in_any_api():
    assert prompt_tokens_of({"prompt_tokens": 7, "input_tokens": 7}) == 7
    assert prompt_tokens_of({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 3}}) == 5
    cached = {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": None}
    assert prompt_tokens_of(cached) == 95
    for body in ({"usage": cached, "content": "a"}, cached):
        assert prompt_tokens_of(peek_whole(json.dumps(body).encode())[2]) == 95
    assert prompt_tokens_of({}) == prompt_tokens_of({"input_tokens": "many"}) == 0


def test_estimated_tokens_are_the_same_in_every_process():
    # Unlike what Python's own hash of a text returns.
    assert list(EstimatedTokens("abcdefg\ud800")) == list(EstimatedTokens("abcdefg\ud800"))
    assert EstimatedTokens("abcdabce")[0] != EstimatedTokens("abcdabce")[1]
    assert EstimatedTokens("abcd")[0] == 4413565704599234494


def test_what_is_cached_of_a_prompt_is_in_its_own_tokens():
    profile = EngineProfile(
        iteration_s=0.01, prefill_token_s=1e-5, sequence_s=5e-4, max_batch=8, token_budget=256,
        kv_capacity_tokens=20_000,
    )  # fmt: skip
    table = ReplicaTable((100.0, 10.0))
    replica = table.add("r", "p", profile, 10, 0.0)
    half, whole = Prompt(range(50), num_tokens=100), Prompt(range(100), num_tokens=200)
    replica.send("a", half, 0, 1.0, 0.0)
    assert replica.in_flight.prefill_tokens == 100
    assert replica.match_tokens(whole) == 100
    assert table.snapshots(table.offered(0.0, 9.0), whole)[0].engine.match_tokens == 100
    assert table.snapshots(table.offered(0.0, 9.0), half)[0].engine.match_tokens < 100


@pytest.mark.parametrize("stream", [False, True])
def test_an_answers_usage_corrects_the_next_requests(stream):
    usage = {"prompt_tokens": 900, "completion_tokens": 1, "total_tokens": 901}

    async def test(client, gateway, endpoints):
        told = json.dumps({"choices": [], "usage": usage}).encode()
        endpoints[0].script = (an_event("a", "stop"), b"data: " + told + b"\n\n", DONE)
        if not stream:
            endpoints[0].headers = {"content-type": "application/json"}
            endpoints[0].script = (told,)
        body = {"model": "m", "prompt": "some words " * 200, "stream": stream}
        seen = [0.0]
        for _ in range(3):
            await client.post("/v1/completions", json=body)
            seen.append(pools_metric(gateway, "prompt_tokens_total"))
        first, second, third = (after - before for before, after in pairwise(seen))
        assert first == pytest.approx(414, abs=10)
        assert (second, third) == (pytest.approx(900, rel=0.02), pytest.approx(900, rel=0.02))

    run(test)


def test_a_response_that_goes_on_from_another_teaches_nothing():
    async def test(client, gateway, endpoints):
        endpoints[0].headers = {"content-type": "application/json"}
        endpoints[0].script = (b'{"usage":{"input_tokens":5000,"output_tokens":1}}',)
        body = {"model": "m", "input": "some words", "previous_response_id": "resp_1"}
        for _ in range(2):
            await client.post("/v1/responses", json=body)
        assert pools_metric(gateway, "prompt_tokens_total") < 10

    run(test)
