"""What endpoints send and operators write is read, or refused by the error that is documented."""

import json

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scripts import ROOT
from sizes import scaled

from serve_app.cluster import Cluster, load_cluster
from serve_app.endpoints import MetricNames
from serve_app.gateway.engine_metrics import read_metrics
from serve_app.gateway.sse import ErrorEvent, EventPeek, peek_whole, prompt_tokens_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**400, -(10**400), 1e308, -1, 2**63]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            "choices delta text finish_reason usage completion_tokens output_tokens error message "
            "response type role content".split()
        )
        | st.text(max_size=3),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
NUMBER = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), None, "5", [1], True])
USAGE = st.dictionaries(st.sampled_from(["completion_tokens", "output_tokens"]), NUMBER)
DELTA = st.fixed_dictionaries({}, optional={"content": JSON, "role": JSON, "tool_calls": JSON})
CHOICE = st.fixed_dictionaries(
    {}, optional={"delta": DELTA | JSON, "text": JSON, "finish_reason": JSON}
)
EVENT = JSON | st.fixed_dictionaries(
    {}, optional={"choices": st.lists(CHOICE, max_size=3) | JSON, "usage": USAGE | JSON,
                  "error": JSON, "type": st.sampled_from(["response.completed", "a.delta", ""])},
)  # fmt: skip
LINE = (
    EVENT.map(lambda one: b"data: " + json.dumps(one).encode())
    | st.binary(max_size=40)
    | st.binary(max_size=40).map(lambda data: b"data:" + data)
    | st.sampled_from([b"data: [DONE]", b"data: 1e999", b": comment", b"data: " + b"[" * 5000])
)
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
MOST_TOKENS = 10**9


@settings(max_examples=scaled(2000))
@given(
    st.lists(LINE, max_size=6),
    st.lists(st.integers(0, 400), max_size=5),
    st.sampled_from([b"", TOKEN]),
)
@example([b'data: {"usage":{"completion_tokens":1e999}}'], [], b"")
@example([b'data: {"usage":{"completion_tokens":%d}}' % 10**400], [], TOKEN)
@example([b'data: {"usage":{"completion_tokens":-5}}'], [], TOKEN)
def test_a_stream_is_counted_or_refused_wherever_it_is_cut(lines, cuts, begin):
    data, peek = begin + b"\n".join(lines) + b"\n", EventPeek()
    ends = sorted(min(cut, len(data)) for cut in cuts)
    out = b""
    try:
        for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
            out += peek.feed(data[start:end])
        out += peek.rest()
    except ErrorEvent:
        return
    assert out == data
    assert type(peek.num_tokens) is int
    # Events after one that says how many there were count one each.
    assert 0 <= peek.num_tokens <= MOST_TOKENS + data.count(b"\n")
    assert peek.finish_reason in (None, "stop", "length")
    assert type(prompt_tokens_of(peek.usage)) is int


@settings(max_examples=scaled(500))
@given(st.binary(max_size=100) | JSON.map(lambda one: json.dumps(one).encode()))
def test_an_answer_that_came_at_once_is_always_counted(body):
    num_tokens, reason, usage = peek_whole(body)
    assert num_tokens >= 0
    assert prompt_tokens_of(usage) >= 0
    assert reason in ("stop", "length")


NAMES = ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]
VALUES = st.sampled_from(
    ["0", "1.0", "-1", "1e308", "-1e308", "NaN", "+Inf", "-Inf", "x", "", "1_0", "0x1", "9" * 400]
) | st.floats().map(str)  # fmt: skip
LABELS = st.sampled_from(["", "{}", '{a="b"}', '{a="} 7"}', "{", "}", '{a="\\""}'])
SAMPLE = st.tuples(st.sampled_from([*NAMES, "up"]), LABELS, VALUES).map(
    lambda one: f"{one[0]}{one[1]} {one[2]}".encode()
)
PAGE = st.lists(SAMPLE | st.binary(max_size=30), max_size=9).map(b"\n".join)


@settings(max_examples=scaled(2000))
@given(PAGE)
@example("\n".join(f"{name} 1e308\n{name} 1e308" for name in NAMES).encode())
def test_any_page_of_metrics_is_read_as_far_as_it_makes_sense(page):
    reading = read_metrics(page, MetricNames())
    assert reading.waiting is None or 0 <= reading.waiting < 10**10
    assert reading.running is None or 0 <= reading.running < 10**10
    assert reading.kv_used_fraction is None or 0.0 <= reading.kv_used_fraction <= 1.0


SHIPPED = [
    yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "serve_app/clusters").glob("*.yaml"))
]
MARK = "@here@"
ODD = st.sampled_from([
    "[" * 3000, "{a: " * 900, "&a [*a, *a]", "1.0e+999", ".nan", "2001-99-99", "!!python/object:x",
    "9" * 5000, "-1", "0", "true", "null", '""', '"\\ud800"', "{1: 2}", "[1, a]", "*a", "? [a]",
    "{? {a: b} : c}", "0o99", "<<: 1", "!!binary x", '"\\0"', "1" * 300, "../../etc/passwd",
])  # fmt: skip


def places_of(value, at=()):
    """Every place in a document, that of the whole included."""
    yield at
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_of(one, (*at, key))


def marked(value, at):
    """The document with a mark in one place."""
    if not at:
        return MARK
    copied = value.copy()
    copied[at[0]] = marked(value[at[0]], at[1:])
    return copied


@st.composite
def cluster_files(draw):
    shipped = draw(st.sampled_from(SHIPPED))
    at = draw(st.sampled_from(list(places_of(shipped))))
    text = yaml.safe_dump(marked(shipped, at), default_flow_style=True, width=10_000)
    text = text.replace(f"'{MARK}'", draw(ODD))
    return text if draw(st.booleans()) else text[: draw(st.integers(0, len(text)))]


@settings(max_examples=scaled(500), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=cluster_files())
def test_a_cluster_file_is_read_or_refused_by_its_name(tmp_path, text):
    file = tmp_path / "odd.yaml"
    file.write_text(text, encoding="utf-8")
    refusal = str(file)
    try:
        assert isinstance(load_cluster(str(file)), Cluster)
    except ValueError as error:
        refusal = str(error)
    assert str(file) in refusal
