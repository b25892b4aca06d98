"""Logs of SGLang and spans of OpenTelemetry become traces; what tells too little is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenyard.workload.readers import TraceError, read_trace

START_S = 1_790_000_000.0
"""2026-09-21T14:13:20Z."""


def finished(at: str, taken_s: float, prompt: int, answer: int, **more: Any) -> str:
    """A line of `--log-requests-format json`."""
    meta = {
        "id": "r", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": prompt,
        "completion_tokens": answer, "cached_tokens": 0, "e2e_latency": taken_s,
    }  # fmt: skip
    obj = {"rid": "r", "stream": True, "sampling_params": {"max_new_tokens": 99}}
    record = {"timestamp": at, "event": "request.finished", "rid": "r", "obj": obj}
    return json.dumps(record | {"out": {"text": "hm", "meta_info": meta | more}})


RECEIVED = json.dumps({"timestamp": "2026-09-21T14:13:20", "event": "request.received", "rid": "r"})
LINES = [
    "[2026-09-21 14:13:00] server_args=ServerArgs(model_path='m', log_requests=True)",
    RECEIVED,
    finished("2026-09-21T14:13:23.500000", 2.5, 30, 7),
    finished("2026-09-21T14:13:22.250000", 2.25, 20, 5),
    finished("2026-09-21T14:13:25", 1.0, 9, 3, finish_reason={"type": "abort", "message": "bye"}),
    finished("2026-09-21T14:13:26", 1.0, 9, 0, finish_reason={"type": "abort", "message": "bye"}),
    finished("2026-09-21T14:13:26", 0.1, 1, 1).replace('"rid": "r"', '"rid": "HEALTH_CHECK_1"'),
]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_sglang_tells_when_requests_came_how_long_they_were_and_how_long_they_took(tmp_path):
    told: list[str] = []
    trace, bad = read_trace(written(tmp_path / "a.log", LINES), tell=told.append)
    assert trace.arrival_s.tolist() == [0.0, 1.0, 4.0]
    assert trace.context_tokens.tolist() == [20, 30, 9]
    assert trace.generated_tokens.tolist() == [5, 7, 3]
    np.testing.assert_array_equal(trace.response_s, [2.25, 2.5, np.nan])
    assert trace.started_at == datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)
    assert bad == 0
    assert "layout SGLang, dates" in told[0]
    assert "failed, without an answer, left out: 1" in told[0]


@pytest.mark.parametrize("prefix", ["[2026-09-21 14:13:2{} TP0] ", ""])
def test_sglang_in_words_has_the_same_and_newer_releases_say_when_it_came(tmp_path, prefix):
    """Words of a prompt do not count; without a stamp the line says when it was received."""
    lines = []
    for second, taken_s in ((2, 0.5), (4, 1.5)):
        came = "" if prefix else f", 'request_received_ts': {START_S + second - taken_s}"
        lines.append(
            prefix.format(second)
            + "Finish: obj=GenerateReqInput(rid='r', text=\"'meta_info': {'prompt_tokens': 1}\"), "
            "out={'text': ' 9', 'meta_info': {'id': 'r', 'finish_reason': {'type': 'length', "
            f"'length': 8}}, 'prompt_tokens': 40, 'completion_tokens': 8, 'cached_tokens': 32{came}"
            f", 'e2e_latency': {taken_s}}}}}"
        )
    trace, _ = read_trace(written(tmp_path / "a.log", lines))
    assert trace.arrival_s.tolist() == [0.0, 1.0]
    assert trace.context_tokens.tolist() == [40, 40]
    assert trace.response_s is not None
    assert trace.response_s.tolist() == [0.5, 1.5]
    assert trace.started_at == datetime(2026, 9, 21, 14, 13, 21, 500_000, UTC)


def test_files_of_a_folder_are_one_trace(tmp_path):
    (tmp_path / "host0_0.log").touch()
    written(tmp_path / "host1_0.log", [LINES[3]])
    written(tmp_path / "host2_0.log", [RECEIVED, LINES[2]])
    trace, _ = read_trace(tmp_path)
    assert trace.context_tokens.tolist() == [20, 30]
    written(tmp_path / "host3_0.log", ["arrival_s,context_tokens,generated_tokens", "0,1,1"])
    with pytest.raises(TraceError, match=r"host3_0\.log: the layout is plain, of the files be"):
        read_trace(tmp_path)


def span(at_s: float, taken_s: float, name: str = "chat m", **attributes: Any) -> dict[str, Any]:
    """A span as OTLP has it in JSON: 64-bit integers are texts."""
    values = [
        {"key": key.replace("__", "."), "value": typed(value)} for key, value in attributes.items()
    ]
    begun = round((START_S + at_s) * 1e9)
    return {
        "traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331", "name": name,
        "kind": 3, "startTimeUnixNano": str(begun),
        "endTimeUnixNano": str(begun + round(taken_s * 1e9)), "attributes": values, "status": {},
    }  # fmt: skip


def typed(value: str | int | float) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


def client(at_s: float, taken_s: float, prompt: int, answer: int, **more: Any) -> dict[str, Any]:
    tokens = {"gen_ai__usage__input_tokens": prompt, "gen_ai__usage__output_tokens": answer}
    return span(at_s, taken_s, **{"gen_ai__operation__name": "chat"} | tokens | more)


def engine(at_s: float, taken_s: float, prompt: int, answer: int) -> dict[str, Any]:
    """What vLLM sends."""
    return span(
        at_s, 9.0, "llm_request", gen_ai__usage__prompt_tokens=prompt,
        gen_ai__usage__completion_tokens=answer, gen_ai__latency__e2e=taken_s,
        gen_ai__latency__time_to_first_token=0.1,
    )  # fmt: skip


def export(*spans: dict[str, Any]) -> str:
    scope = {"scope": {"name": "x"}, "spans": [*spans]}
    return json.dumps({"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]})


def test_spans_of_clients_are_requests_and_those_of_agents_tools_and_failures_are_not(tmp_path):
    failed = span(3, 1.0, gen_ai__operation__name="chat") | {"status": {"code": 2}}
    lines = [
        export(client(2, 0.5, 11, 4), span(0, 9.0, "GET /")),
        export(client(0, 1.5, 10, 3), failed),
        export(client(0, 8.0, 21, 7, gen_ai__operation__name="invoke_agent")),
    ]
    trace, _ = read_trace(written(tmp_path / "spans.jsonl", lines))
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.context_tokens.tolist() == [10, 11]
    assert trace.generated_tokens.tolist() == [3, 4]
    assert trace.response_s is not None
    assert trace.response_s.tolist() == pytest.approx([1.5, 0.5])


def test_a_request_of_which_client_and_engine_tell_counts_once_as_the_engine_has_it(tmp_path):
    lines = [export(client(0, 1.5, 10, 3)), export(engine(0.25, 1.125, 12, 3))]
    trace, _ = read_trace(written(tmp_path / "spans.jsonl", lines))
    assert trace.context_tokens.tolist() == [12]
    assert trace.response_s is not None
    assert trace.response_s.tolist() == [1.125]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([*LINES[:3], LINES[2][:-9]], "line 4: no time, or no meta_info, of a request of SGLang"),
        ([LINES[2].replace("completion_tokens", "x")], "line 1: no completion_tokens in meta_info"),
        (["Finish: obj=Req(rid='r')"], "line 1: no time, or no meta_info"),
        ([LINES[2].replace(": 30", ": -1")], "line 1: negative context tokens -1"),
        ([RECEIVED], "line 2: the file has lines of SGLang and no request"),
        ([export(span(0, 1.0, "GET /"))], "the file has lines of OpenTelemetry and no request"),
        ([export(client(0, 1, 2, 3)), '{"resourceSpans": 1'], "line 2: not an object with resourc"),
        ([export(span(0, 1.0, gen_ai__operation__name="chat"))],
         "line 1: a span 'chat m' of a request has no gen_ai.usage.input_tokens"),
        ([export(client(0, 1.0, 2, 3) | {"endTimeUnixNano": None})], "has no start or end in nano"),
        (["INFO 11-07 04:35:27 [api_server.py:18] vLLM API server version 0.11.0",
          "INFO 11-07 04:35:28 [logger.py:47] Received request chatcmpl-1: params: SamplingPar"],
         "vLLM's log has no numbers of tokens.*--otlp-traces-endpoint"),
    ],
)  # fmt: skip
def test_a_log_that_tells_too_little_is_refused_with_a_sentence(tmp_path, lines, reason):
    with pytest.raises(TraceError, match=reason):
        read_trace(written(tmp_path / "a.log", lines))


def test_an_empty_folder_is_no_trace(tmp_path):
    with pytest.raises(TraceError, match="the folder has no file"):
        read_trace(tmp_path)
