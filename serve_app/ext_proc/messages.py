"""Messages of Envoy's external processing service (ext_proc v3), as far as a picker sends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from serve_app.ext_proc.protocol import REPLACE, ProcessingResponse
from serve_app.gateway.generation import Headers

DESTINATION = "x-gateway-destination-endpoint"
"""Where a request is to go, in the header and in the metadata of the same name."""
DECISION = b"x-gateway-decision-id"
"""A header of the request, by which a filter that observes says whose answer it shows."""
_SERVED, _SUBSET = f"{DESTINATION}-served", f"{DESTINATION}-subset"
_LB, _HINT = "envoy.lb", "envoy.lb.subset_hint"
_FILTER, _UPSTREAM = "envoy.filters.http.ext_proc", "upstream.address"
_MOST_BYTES = 62_000
"""Of a body in one message, below the limit of gRPC and Envoy's windows."""

_ALL = ("request_headers", "request_body", "request_trailers", "response_headers", "response_body",
        "response_trailers")  # fmt: skip


def _unchanged(kind: str) -> bytes:
    response = ProcessingResponse()
    getattr(response, kind).SetInParent()
    return _bytes_of(response)


def _bytes_of(response: Any) -> bytes:
    serialized: bytes = response.SerializeToString()
    return serialized


GO_ON = {kind: _unchanged(kind) for kind in _ALL}
"""Answers that change nothing, by the message they are to."""


def headers_of(head: Any) -> list[tuple[bytes, bytes]]:
    """Return the headers of an `HttpHeaders`, pseudo headers included, in small letters."""
    return [
        (header.key.lower(), header.raw_value or header.value) for header in head.headers.headers
    ]


def subset_of(message: Any) -> list[str] | None:
    """Return the endpoints, `ip:port`, that a proxy allows; None: it does not say."""
    value = _field(message.metadata_context.filter_metadata, _HINT, _SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "list_value":
        return [endpoint.string_value.strip() for endpoint in value.list_value.values]
    return [endpoint.strip() for endpoint in value.string_value.split(",") if endpoint.strip()]


def served_by(message: Any) -> str:
    """Return the endpoint, `ip:port`, that has answered; empty: the proxy does not say."""
    value = _field(message.metadata_context.filter_metadata, _LB, _SERVED)
    value = value or _field(message.attributes, _FILTER, _UPSTREAM)
    return "" if value is None else str(value.string_value)


def _field(entries: Any, name: str, field: str) -> Any:
    """Return a value of the struct of some name; None: it is not there."""
    for entry in entries:
        if entry.key == name and field in entry.value.fields:
            return entry.value.fields[field]
    return None


def place(
    kind: str, endpoints: Iterable[str], headers: Headers, removed: Iterable[str],
    body: bytes | None = None,
) -> bytes:  # fmt: skip
    """Name endpoints, the best first, in answer to a message of that kind.

    The request's headers are replaced or removed, and its body where one is given.
    """
    response, value = ProcessingResponse(), ",".join(endpoints)
    common = getattr(response, kind).response
    _set_headers(common.header_mutation, [(DESTINATION.encode(), value.encode()), *headers])
    common.header_mutation.remove_headers.extend(removed)
    if body is not None:
        common.body_mutation.body = body
    response.dynamic_metadata.get_or_create_struct(_LB)[DESTINATION] = value
    return _bytes_of(response)


def pieces(kind: str, body: bytes, is_end: bool) -> Iterator[bytes]:
    """Hand a body on in full duplex, or a piece of it."""
    for start in range(0, max(len(body), 1), _MOST_BYTES):
        response, end = ProcessingResponse(), start + _MOST_BYTES
        piece = getattr(response, kind).response.body_mutation.streamed_response
        piece.body = body[start:end]
        piece.end_of_stream = is_end and end >= len(body)
        yield _bytes_of(response)


def refusal(status: int, headers: Headers, body: bytes) -> bytes:
    """Answer a request at once."""
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code, immediate.body = status, body
    kept = [header for header in headers if header[0] not in (b"content-length", b"connection")]
    _set_headers(immediate.headers, kept)
    return _bytes_of(response)


def answered(headers: Headers) -> bytes:
    """Add headers to the head of an answer."""
    response = ProcessingResponse()
    _set_headers(response.response_headers.response.header_mutation, headers)
    return _bytes_of(response)


def _set_headers(mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=REPLACE)
        option.header.key, option.header.raw_value = name, value
