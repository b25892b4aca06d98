"""Requests in what engines write: SGLang's request log, and OpenTelemetry spans in OTLP JSON.

docs/workloads.md says how to make an engine write them, and what is taken of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple


class TraceRow(NamedTuple):
    """One row as text; `fault` says why it has no fields."""

    line: int
    time: str = ""
    context: str = ""
    generated: str = ""
    response: str = ""
    hashes: tuple[int, ...] = ()
    fault: str | None = None
    file: str = ""


_SGLANG_LINE = re.compile(r'Finish: obj=|"event": "request\.finished"')
_SGLANG_HEALTH = re.compile(r"""rid['"]?(=|: )['"]HEALTH_CHECK""")
_SGLANG_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_SGLANG_META = re.compile(
    r"'(prompt_tokens|completion_tokens|e2e_latency|request_received_ts|type)': '?([\w.+-]+)"
)
_INPUT = "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"
"""The convention's name, and its older one, which vLLM and SGLang write."""
_OUTPUT = "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"
_ENGINE_TIME = "gen_ai.latency.e2e"
"""Seconds; only spans of engines have it."""
_GENERATING = "chat", "text_completion", "generate_content"
"""Values of `gen_ai.operation.name` that are requests to a model that answers in tokens."""


def sglang_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    """Requests that SGLang has finished, by `--log-requests` in either format.

    A request came when it was received, or so long before its line as it took. One that was
    aborted has no response time; health checks are none.
    """
    for line, text in enumerate(lines, start=1):
        if not _SGLANG_LINE.search(text) or _SGLANG_HEALTH.search(text):
            continue
        try:
            if text.lstrip().startswith("{"):
                record = json.loads(text)
                meta, ended = dict(record["out"]["meta_info"]), record["timestamp"]
                meta |= {"type": (meta.get("finish_reason") or {}).get("type")}
            else:
                begun = text.rindex("'meta_info': {")
                meta, stamp = dict(_SGLANG_META.findall(text, begun)), _SGLANG_TIME.search(text)
                ended = stamp and stamp[1]
            taken_s, came = meta["e2e_latency"], meta.get("request_received_ts")
            if came is None:
                came = datetime.fromisoformat(ended) - timedelta(seconds=float(taken_s))
            tokens = str(meta["prompt_tokens"]), str(meta["completion_tokens"])
            yield TraceRow(
                line, str(came), *tokens, "" if meta["type"] == "abort" else str(taken_s)
            )
        except KeyError as error:
            yield TraceRow(line, fault=f"no {error.args[0]} in meta_info of a request of SGLang")
        except (ValueError, TypeError, AttributeError):
            yield TraceRow(line, fault="no time, or no meta_info, of a request of SGLang")


def span_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    """Requests by their spans: those of engines where there are any, else those of clients.

    An engine's span and its client's tell of the same request.
    """
    clients: list[TraceRow] = []
    has_engines = False
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            spans = [*_spans(json.loads(text))]
        except (ValueError, TypeError, KeyError, AttributeError):
            yield TraceRow(line, fault="not an object with resourceSpans, as OTLP has them in JSON")
            continue
        for span, attributes in spans:
            if _ENGINE_TIME in attributes:
                has_engines = True
                yield _span_row(line, span, attributes)
            elif _is_request(span, attributes):
                clients.append(_span_row(line, span, attributes))
    if not has_engines:
        yield from clients


def _spans(export: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Spans of one line, each with its attributes by name."""
    for resource in export["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                attributes = {pair["key"]: pair["value"] for pair in span.get("attributes", ())}
                yield (
                    span,
                    {name: next(iter(value.values()), None) for name, value in attributes.items()},
                )


def _is_request(span: dict[str, Any], attributes: dict[str, Any]) -> bool:
    """Whether a client's span is of a request that was answered: not of an agent, or a failure."""
    has_failed = (span.get("status") or {}).get("code") in (2, "STATUS_CODE_ERROR")
    operation = attributes.get("gen_ai.operation.name")
    has_tokens = any(name in attributes for name in (*_INPUT, *_OUTPUT))
    return not has_failed and (operation in _GENERATING or (operation is None and has_tokens))


def _span_row(line: int, span: dict[str, Any], attributes: dict[str, Any]) -> TraceRow:
    tokens = [attributes.get(name, attributes.get(older)) for name, older in (_INPUT, _OUTPUT)]
    if None in tokens:
        lacking = (_INPUT, _OUTPUT)[tokens.index(None)][0]
        return TraceRow(line, fault=f"a span {span.get('name')!r} of a request has no {lacking}")
    try:
        begun, ended = (int(span[f"{edge}TimeUnixNano"]) for edge in ("start", "end"))
    except (KeyError, ValueError, TypeError):
        return TraceRow(
            line, fault=f"a span {span.get('name')!r} has no start or end in nanoseconds"
        )
    taken_s = attributes.get(_ENGINE_TIME, (ended - begun) / 1e9)
    return TraceRow(line, str(begun), str(tokens[0]), str(tokens[1]), str(taken_s))
