"""The way of requests to replicas, which speak OpenAI's API: as the bytes that they are."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.cluster import Cluster, SloClass
from serve_app.engines.tokenizer import EstimatedTokens, EstimatingTokenizer, Tokenizer
from serve_app.gateway.callers import Caller
from serve_app.gateway.exchange import Call, InferenceRequest, RequestServer
from serve_app.gateway.gateway import Refused, Unserved
from serve_app.gateway.generation import RequestRejected, new_id
from serve_app.gateway.replicas import Prompt
from serve_app.gateway.tracing import HEADERS as TRACE
from serve_app.http.answering import answer
from serve_app.http.auth import caller_of
from serve_app.http.connection import connection_of
from serve_app.http.generation_reader import Generation, GenerationReader
from serve_app.http.image_tokens import Formula, formula_of
from serve_app.http.intake import OPENAI_PATHS
from serve_app.http.peek import Peek, peek, peek_form
from serve_app.http.prompt_size import PromptSize, PromptTokens
from serve_app.http.reasons import BadRequest
from serve_app.http.tenants import tenant_of
from serve_app.models import ModelCatalog, ServedModel

_HANDED_ON = frozenset(
    (
        b"accept", b"anthropic-beta", b"anthropic-version", b"baggage", b"content-type",
        b"idempotency-key", b"openai-beta", b"openai-organization", b"openai-project",
        b"traceparent", b"tracestate", b"user-agent", b"x-request-id",
    )
)  # fmt: skip
_CLASS = b"x-service-tier"
_RESPONSES = "/v1/responses"
_MOST_RESPONSES, _KEPT_S = 100_000, 86_400.0
"""Responses whose endpoints are kept, and for how long."""
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")

Tokenizers = Tokenizer | Mapping[str, Tokenizer]
"""One for all that is served, or those of own pools by the model's name: the tokens of other models
are estimated."""

Refusal = Callable[[Request, Exception], Awaitable[Response]]


class DataPath:
    """ASGI application of the routes that replicas answer, whose bodies have been read."""

    def __init__(self, gateway: RequestServer, tokenizers: Tokenizers, refuse: Refusal) -> None:
        """Answer by a gateway.

        Args:
            gateway: Has requests answered.
            tokenizers: Say how long prompts are.
            refuse: Writes a refusal.
        """
        self._gateway, self._refuse = gateway, refuse
        cluster = gateway.cluster
        self._orders = any(one.order == "priority" for one in cluster.external_pools)
        passed = (one.encode() for pool in cluster.external_pools for one in pool.pass_headers)
        self._others = frozenset(passed) - _HANDED_ON
        self._responses = OrderedDict[str, tuple[float, str, str]]()
        """Of the last responses, by id: when they were made, seconds, where, and their model."""
        self._catalog = ModelCatalog(cluster)
        models = self._catalog.models
        if not isinstance(tokenizers, Mapping):
            tokenizers = dict.fromkeys(models, tokenizers)
        estimate = EstimatingTokenizer()
        self._tokenizers = {name: tokenizers.get(name, estimate) for name in models}
        self._prompts = {name: PromptTokens(_images_of(cluster, name)) for name in models}
        self._readers = {
            name: GenerationReader(
                self._tokenizers[name],
                name,
                cluster.limits,
                max(pool.config.max_model_tokens for pool in one.own),
            )
            for name, one in models.items()
            if one.own
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            allowed = ("POST",) if scope["path"] in OPENAI_PATHS else _METHODS
            if scope["method"] not in allowed:
                raise HTTPException(405, "Method Not Allowed", {"allow": ", ".join(allowed)})
            body = (await receive())["body"]
            known = self._peek(scope, body)
            is_response = scope["path"].startswith(_RESPONSES)
            made = self._responses.get(_response_id(scope["path"], known)) if is_response else None
            if made is not None and known.model is None:
                known.model = made[2]
            model = self._model(known, caller_of(scope))
            service_class = self._class(scope, known)
            request = await self._request(scope, body, known, model)
            if made is not None and made[2] == model.name and time.monotonic() - made[0] < _KEPT_S:
                request.sticks_to = made[1]
            if scope["path"] == _RESPONSES:
                request.hear = partial(self._note_response, model.name)
            connection = connection_of(scope)
            await answer(self._gateway, request, service_class, receive, send, connection)
        except (BadRequest, HTTPException, Refused, Unserved, RequestRejected) as error:
            response = await self._refuse(Request(scope), error)
            await response(scope, receive, send)

    def _peek(self, scope: Scope, body: bytes) -> Peek:
        """What a body says, whose form its head tells; routes that are not POST's need none."""
        if body.startswith(b"--"):
            return peek_form(body, _header(scope, b"content-type") or "")
        return peek(body if body or scope["path"] in OPENAI_PATHS else b"{}")

    def _model(self, known: Peek, caller: Caller) -> ServedModel:
        """The model that is asked for.

        Raises:
            BadRequest: It is not served, or not to this caller.
        """
        found = self._catalog.find(known.model)
        if found is None:
            assert known.model is not None
            raise BadRequest(self._catalog.refusal(known.model), 404, "model")
        if caller.models is not None and found.name not in caller.models:
            raise BadRequest(f"your key may not ask model {found.name!r}", 403, "model")
        return found

    def _note_response(self, model: str, replica_id: str, response_id: str) -> None:
        """Keep which endpoint holds a response, for requests that go on from it."""
        self._responses[response_id] = time.monotonic(), replica_id, model
        self._responses.move_to_end(response_id)
        if len(self._responses) > _MOST_RESPONSES:
            self._responses.popitem(last=False)

    def _class(self, scope: Scope, known: Peek) -> SloClass:
        if self._orders and known.priority is not None:
            raise BadRequest("priority is set by the gateway here; leave it out", param="priority")
        return _find_class(self._gateway, known.class_name or _header(scope, _CLASS))

    async def _request(
        self, scope: Scope, body: bytes, known: Peek, model: ServedModel
    ) -> InferenceRequest:
        generation = await self._generation(scope["path"], known, model)
        prompt, learn = None, None
        method, caller = scope["method"].encode(), caller_of(scope)
        call = Call(_path(scope), _headers(scope), body, known.stream, method, known.model_at)
        if self._others:
            call.others = [one for one in scope["headers"] if one[0] in self._others]
        if generation is None:
            name, longest = f"req-{new_id()}", known.max_tokens
            ids, prompt, learn = self._measure(known, model.name)
        else:
            name = f"{'chatcmpl' if generation.is_chat else 'cmpl'}-{new_id()}"
            ids, longest = generation.token_ids, generation.sampling.max_tokens
        return InferenceRequest(
            name, ids, longest, call, generation is not None, model=model.name,
            tenant=self._tenant(scope, caller), caller=caller, hashed=prompt, learn=learn,
            trace=_headers(scope, TRACE) if self._gateway.tracing is not None else b"",
        )  # fmt: skip

    def _tenant(self, scope: Scope, caller: Caller) -> str:
        """Whose share of the service it is: the key's; without a file of keys the header's."""
        cluster = self._gateway.cluster
        is_named = cluster.tenants and cluster.gateway.keys is None
        named = tenant_of(scope["headers"]) if is_named else None
        return cluster.tenant_named(caller.tenant or named)

    def _measure(
        self, known: Peek, model: str
    ) -> tuple[Sequence[int], Prompt | None, Callable[[int], None] | None]:
        """The prompt of a body that endpoints tokenise, and who is told how long it was."""
        if (ids := known.token_ids) is not None:
            return ids, None, None
        prompts, tokenizer = self._prompts[model], self._tokenizers[model]
        size = PromptSize(known.fields, prompts.images)
        if not isinstance(tokenizer, EstimatingTokenizer):
            return tokenizer.encode(size.text) or [0], None, None
        number = prompts.estimate(size.expected)
        prompt = Prompt(EstimatedTokens(size.text), num_tokens=number)
        # What a response goes on from is in no body.
        is_whole = known.fields.get("previous_response_id") is None
        learn = partial(prompts.learn, size.expected, number) if is_whole else None
        return range(number), prompt, learn

    async def _generation(self, path: str, known: Peek, model: ServedModel) -> Generation | None:
        """The body as engines of ours take it; None: there are none, or they do not.

        Raises:
            BadRequest: They do not, and nobody else may know more.
        """
        reader = self._readers.get(model.name)
        if reader is None:
            return None
        try:
            return await reader.read(path, known.fields)
        except BadRequest:
            if not model.has_endpoints:
                raise
            # Endpoints may know more, and say what is wrong where they do not.
            return None


def _response_id(path: str, known: Peek) -> str:
    """The response that a request is about, or goes on from; empty: none."""
    if path.startswith(f"{_RESPONSES}/"):
        return path.split("/")[3]
    previous = known.fields.get("previous_response_id")
    return previous if isinstance(previous, str) else ""


def _images_of(cluster: Cluster, model: str) -> Formula:
    """What counts a model's images, by the name that its endpoints know it by."""
    pools = (one for one in cluster.external_pools if cluster.model_of(one) == model)
    return formula_of(next((one.model for one in pools), model))


def _find_class(gateway: RequestServer, name: str | None) -> SloClass:
    """Return the class of that name, the first for None.

    Raises:
        BadRequest: There is none.
    """
    found = gateway.service_class(name)
    if found is None:
        known = [one.name for one in gateway.cluster.classes]
        raise BadRequest(
            f"service_tier {name!r} is not known; choose one of {known}", param="service_tier"
        )
    return found


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value).decode("latin-1")
    return None


def _path(scope: Scope) -> bytes:
    query = scope["query_string"]
    # As the caller wrote it: what is decoded may hold ends of lines.
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path + b"?" + query if query else path


def _headers(scope: Scope, names: Container[bytes] = _HANDED_ON) -> bytes:
    lines = [b"%b: %b\r\n" % (name, value) for name, value in scope["headers"] if name in names]
    return b"".join(lines)
