"""Messages of Envoy's external processing service (ext_proc v3), as far as a picker sends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    HeaderMutation,
    HeadersResponse,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

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
_REPLACE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

GO_ON = {
    kind: ProcessingResponse(**{kind: response()}).SerializeToString()
    for kind, response in (
        ("request_headers", HeadersResponse),
        ("request_body", BodyResponse),
        ("request_trailers", TrailersResponse),
        ("response_headers", HeadersResponse),
        ("response_body", BodyResponse),
        ("response_trailers", TrailersResponse),
    )
}
"""Answers that change nothing, by the message they are to."""


def headers_of(message: HttpHeaders) -> list[tuple[bytes, bytes]]:
    """Return the headers of a message, pseudo headers included."""
    return [
        (header.key.lower().encode("latin-1"), header.raw_value or header.value.encode())
        for header in message.headers.headers
    ]


def subset_of(message: ProcessingRequest) -> list[str] | None:
    """Return the endpoints, `ip:port`, that a proxy allows; None: it does not say."""
    hint = message.metadata_context.filter_metadata.get(_HINT)
    if hint is None or _SUBSET not in hint.fields:
        return None
    value = hint.fields[_SUBSET]
    if value.WhichOneof("kind") == "list_value":
        return [each.string_value.strip() for each in value.list_value.values]
    return [each.strip() for each in value.string_value.split(",") if each.strip()]


def served_by(message: ProcessingRequest) -> str:
    """Return the endpoint, `ip:port`, that has answered; empty: the proxy does not say."""
    metadata = message.metadata_context.filter_metadata.get(_LB)
    if metadata is not None and _SERVED in metadata.fields:
        return str(metadata.fields[_SERVED].string_value)
    attributes = message.attributes.get(_FILTER)
    if attributes is not None and _UPSTREAM in attributes.fields:
        return str(attributes.fields[_UPSTREAM].string_value)
    return ""


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


def _bytes_of(response: ProcessingResponse) -> bytes:
    serialized: bytes = response.SerializeToString()
    return serialized


def _set_headers(mutation: HeaderMutation, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_REPLACE)
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
