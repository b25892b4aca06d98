"""The way of requests to replicas: bodies of OpenAI's API are passed as bytes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serve_app.cluster import SloClass
from serve_app.engines.base import Generation
from serve_app.engines.tokenizer import EstimatedTokens, EstimatingTokenizer, Tokenizer
from serve_app.gateway.callers import Caller
from serve_app.gateway.exchange import Call, InferenceRequest
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import Refused, RequestRejected, Unserved, new_id
from serve_app.gateway.kv_events import adapter_number
from serve_app.gateway.replicas import Prompt
from serve_app.gateway.tracing import HEADERS as TRACE
from serve_app.http.answering import answer
from serve_app.http.connection import connection_of
from serve_app.http.generation_reader import GenerationReader, tokens_of
from serve_app.http.image_tokens import formula_of
from serve_app.http.intake import OPENAI_PATHS, SENDER, Intake, Refusal
from serve_app.http.peek import Peek, peek, peek_form, read_fields
from serve_app.http.prompt_size import PromptSize, PromptTokens
from serve_app.http.reasons import BadRequest
from serve_app.models import ModelCatalog, ServedModel
from tokenyard.routing.prefix_index import WHOLE_PROMPT

_HANDED_ON = frozenset(
    (
        b"accept", b"anthropic-beta", b"anthropic-version", b"baggage", b"content-type",
        b"idempotency-key", b"openai-beta", b"openai-organization", b"openai-project",
        b"traceparent", b"tracestate", b"user-agent", b"x-request-id",
    )
)  # fmt: skip
_CLASS, _TENANT, _SESSION = b"x-service-tier", b"x-tenant", b"x-session-id"
_OBJECTIVE, _FAIRNESS = b"x-gateway-inference-objective", b"x-gateway-inference-fairness-id"
"""Of the Gateway API Inference Extension: names of a class and of a tenant."""
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_SESSION_CHARS = 200
_RESPONSES = "/v1/responses"
_MOST_RESPONSES, _KEPT_S = 100_000, 86_400.0
"""Responses whose endpoints are kept, and for how long."""
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")

Tokenizers = Tokenizer | Mapping[str, Tokenizer]
"""One for all that is served, or those of own pools by the model's name: the tokens of other models
are estimated."""


class DataPath:
    """ASGI application of the routes that replicas answer."""

    def __init__(
        self, gateway: Gateway, tokenizers: Tokenizers, intake: Intake, refuse: Refusal
    ) -> None:
        self._gateway, self._intake, self._refuse = gateway, intake, refuse
        cluster = gateway.cluster
        self._orders = any(pool.order == "priority" for pool in cluster.external_pools)
        passed = (name.encode() for pool in cluster.external_pools for name in pool.pass_headers)
        self._others = frozenset(passed) - _HANDED_ON
        self._responses = OrderedDict[str, tuple[float, str, str, str]]()
        """The last responses, by id: time of creation, seconds, endpoint, model and session."""
        self._catalog = ModelCatalog(cluster)
        models = self._catalog.models
        if not isinstance(tokenizers, Mapping):
            tokenizers = dict.fromkeys(models, tokenizers)
        estimate = EstimatingTokenizer()
        self._tokenizers = {name: tokenizers.get(name, estimate) for name in models}
        # Makers of models have formulas for images by the names that endpoints know.
        own_names = {cluster.model_of(pool): pool.model for pool in cluster.external_pools[::-1]}
        self._prompts = {
            name: PromptTokens(formula_of(own_names.get(name, name))) for name in models
        }
        self._readers = {
            name: GenerationReader(
                self._tokenizers[name],
                name,
                cluster.limits,
                max(pool.config.max_model_tokens for pool in model.own),
            )
            for name, model in models.items()
            if model.own
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        taken = await self._intake.take(scope, receive, send)
        if taken is None:
            return
        try:
            request, service_class = await self._request(scope, *taken)
            sender = scope.get("extensions", {}).get(SENDER)
            if sender is not None:
                request.sender = sender
                return await self._gateway.serve(request, service_class, sender)
            connection = connection_of(scope)
            await answer(self._gateway, request, service_class, receive, send, connection)
        except (BadRequest, HTTPException, Refused, Unserved, RequestRejected) as error:
            response = await self._refuse(Request(scope), error)
            await response(scope, receive, send)

    async def _request(
        self, scope: Scope, caller: Caller, body: bytes
    ) -> tuple[InferenceRequest, SloClass]:
        """Read a request and its class; BadRequest: it cannot be served."""
        path, method = scope["path"], scope["method"]
        allowed = ("POST",) if path in OPENAI_PATHS else _METHODS
        if method not in allowed:
            raise HTTPException(405, "Method Not Allowed", {"allow": ", ".join(allowed)})
        headers = dict(reversed(scope["headers"]))  # The first of a name counts.
        if body.startswith(b"--"):
            peeked = peek_form(body, headers.get(b"content-type", b"").decode("latin-1"))
        else:
            peeked = peek(read_fields(body if body or path in OPENAI_PATHS else b"{}"))
        is_response = path.startswith(_RESPONSES)
        noted = self._responses.get(_response_id(path, peeked)) if is_response else None
        if noted is not None and peeked.model is None:
            peeked.model = noted[2]
        model = self._model(peeked, caller)
        service_class = self._class(peeked, headers)
        reader = self._readers.get(model.name)
        generation = None if reader is None else await _generation(reader, path, peeked, model)
        query = scope["query_string"]
        # As the caller wrote it: what is decoded may hold ends of lines.
        target: bytes = scope.get("raw_path") or path.encode()
        target = target + b"?" + query if query else target
        lines = _lines(scope, _HANDED_ON)
        call = Call(
            target, lines, body, peeked.stream, method.encode(), peeked.model_at,
            generates=path in _GENERATING,
        )  # fmt: skip
        if self._others:
            call.others = [header for header in scope["headers"] if header[0] in self._others]
        prompt, learn = None, None
        if generation is None:
            name, longest = f"req-{new_id()}", peeked.max_tokens
            ids, prompt, learn = await self._measure(peeked, path, model)
        else:
            name = f"{'chatcmpl' if generation.is_chat else 'cmpl'}-{new_id()}"
            ids, longest = generation.token_ids, generation.sampling.max_tokens
        cluster, tenant = self._gateway.cluster, caller.tenant
        if not tenant and cluster.gateway.keys is None:
            tenant = (headers.get(_TENANT) or headers.get(_FAIRNESS, b"")).decode("latin-1")
        request = InferenceRequest(
            name, ids, longest, call, model=model.name,
            tenant=cluster.tenant_named(tenant), caller=caller, prompt=prompt, learn=learn,
            generation=generation,
            trace=b"" if self._gateway.tracing is None else _lines(scope, TRACE),
        )  # fmt: skip
        if cluster.sessions is not None:
            request.session = _session_of(peeked, headers, "" if noted is None else noted[3])
            if is_response and request.session is None:
                # Responses that go on from each other are one session, of the first one's name.
                request.session = name
        if noted is not None and noted[2] == model.name and time.monotonic() - noted[0] < _KEPT_S:
            request.sticks_to = noted[1]
        if path == _RESPONSES:
            request.hear = partial(self._note_response, model.name, request.session or "")
        return request, service_class

    def _model(self, peeked: Peek, caller: Caller) -> ServedModel:
        """Return the model of a request; BadRequest: it is not served, or not to this caller."""
        model = self._catalog.find(peeked.model)
        if model is None:
            assert peeked.model is not None
            raise BadRequest(self._catalog.refusal(peeked.model), 404, "model")
        if caller.models is not None and model.name not in caller.models:
            raise BadRequest(f"your key may not ask model {model.name!r}", 403, "model")
        return model

    def _note_response(self, model: str, session: str, replica_id: str, response_id: str) -> None:
        """Remember which endpoint holds a response, for requests that continue it."""
        self._responses[response_id] = time.monotonic(), replica_id, model, session
        self._responses.move_to_end(response_id)
        if len(self._responses) > _MOST_RESPONSES:
            self._responses.popitem(last=False)

    def _class(self, peeked: Peek, headers: Mapping[bytes, bytes]) -> SloClass:
        """Return the class of that name, or the first for none; BadRequest: it is unknown."""
        if self._orders and peeked.priority is not None:
            raise BadRequest("priority is set by the gateway here; leave it out", param="priority")
        name = peeked.class_name or headers.get(_CLASS, b"").decode("latin-1")
        service_class = self._gateway.cluster.service_class(name)
        objective = headers.get(_OBJECTIVE, b"").decode("latin-1")
        if not name and objective:
            service_class = self._gateway.class_of_objective(objective)
        if service_class is None:
            names = [slo_class.name for slo_class in self._gateway.cluster.classes]
            raise BadRequest(
                f"service_tier {name!r} is not known; choose one of {names}", param="service_tier"
            )
        return service_class

    async def _measure(
        self, peeked: Peek, path: str, model: ServedModel
    ) -> tuple[Sequence[int], Prompt | None, Callable[[int], None] | None]:
        """Measure a prompt that endpoints tokenise; also return who learns its true length."""
        # What an adapter computes of a prompt is not what its model does.
        parent = WHOLE_PROMPT if model.parent is None else adapter_number(model.name)
        for name in ("prompt", "input", "input_ids"):
            ids = peeked.fields.get(name)
            if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
                return ids, Prompt(ids, parent=parent), None
        prompts, tokenizer = self._prompts[model.name], self._tokenizers[model.name]
        size = PromptSize(peeked.fields, prompts.images)
        if not isinstance(tokenizer, EstimatingTokenizer):
            ids = await tokens_of(path, peeked.fields, size.text, tokenizer) or [0]
            return ids, Prompt(ids, parent=parent), None
        number = prompts.estimate(size.expected)
        prompt = Prompt(EstimatedTokens(size.text), num_tokens=number, parent=parent)
        # What a response goes on from is in no body.
        is_whole = peeked.fields.get("previous_response_id") is None
        learn = partial(prompts.learn, size.expected, number) if is_whole else None
        return range(number), prompt, learn


async def _generation(
    reader: GenerationReader, path: str, peeked: Peek, model: ServedModel
) -> Generation | None:
    """Return the body for our engines; None: only endpoints can answer it."""
    try:
        return await reader.read(path, peeked.fields)
    except BadRequest:
        if not model.has_endpoints:
            raise
        # Endpoints may know more, and say what is wrong where they do not.
        return None


def _response_id(path: str, peeked: Peek) -> str:
    """The response that a request is about, or continues; empty: none."""
    if path.startswith(f"{_RESPONSES}/"):
        return path.split("/")[3]
    previous = peeked.fields.get("previous_response_id")
    return previous if isinstance(previous, str) else ""


def _session_of(peeked: Peek, headers: Mapping[bytes, bytes], before: str) -> str | None:
    """The name of a request's session; None: it names none.

    `before` is the session of the response that it goes on from; empty: there is none.
    """
    header, fields = headers.get(_SESSION, b"").decode("latin-1"), peeked.fields
    named = (header, fields.get("prompt_cache_key"), before, fields.get("user"))
    return next((name[:_SESSION_CHARS] for name in named if isinstance(name, str) and name), None)


def _lines(scope: Scope, names: Container[bytes]) -> bytes:
    """Return the headers of these names as complete lines."""
    lines = [b"%b: %b\r\n" % (name, value) for name, value in scope["headers"] if name in names]
    return b"".join(lines)
