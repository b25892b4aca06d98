"""The gateway over HTTP: OpenAI's routes beside our own."""

from __future__ import annotations

import asyncio
import html
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from importlib import resources
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException

from serve_app.cluster import SloClass
from serve_app.engines.base import Sampling
from serve_app.engines.tokenizer import Tokenizer
from serve_app.gateway.gateway import Gateway, Refused, Unserved
from serve_app.gateway.generation import GenerationChunk, GenerationRequest
from serve_app.http import errors
from serve_app.http.auth import Access, Denied
from serve_app.http.decide import RoutingService
from serve_app.http.decide_schema import PolicyAnswer, Problem, RouteAnswer, RouteMessage
from serve_app.http.openai_schema import (
    AssistantMessage,
    ChatAnswer,
    ChatBody,
    ChatChoice,
    CompletionAnswer,
    CompletionBody,
    CompletionChoice,
    ErrorAnswer,
    GenerationBody,
    ModelCard,
    ModelList,
    Usage,
)
from serve_app.policy.decider import Decider
from serve_app.policy.lifecycle import Conflict, Lifecycle, PoliciesAnswer, PoliciesChange
from serve_app.policy.manager import RAY_DEFAULT

_PAGE_MAY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
)
"""The page asks this server alone."""
_LONG_TEXT = 4_000
"""Characters from which on a prompt is tokenised off the event loop."""
_LARGEST_SEED = 2**63 - 1
_ClassHeader = Annotated[str | None, Header(alias="x-service-tier", max_length=40)]
_OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/models")


class PolicyChange(BaseModel):
    """Body of `POST /v1/policy`."""

    model_config = {"extra": "forbid", "strict": True}

    policy: Annotated[str, Field(min_length=1, max_length=1024)]
    """`champion`, `generic`, a policy file (.npz), a rule's name, or `ray_default`."""
    explore_fraction: Annotated[float, Field(ge=0, le=0.05, allow_inf_nan=False)] | None = None
    """Absent: the cluster file's."""


class GatewayPolicyAnswer(PolicyAnswer):
    """What decides, what stands in for it, and what has happened since the start."""

    active: str
    """The name that was asked for."""
    baseline: str
    """Decides where the policy cannot."""
    missing: str | None
    """Why the policy that was asked for is not there; the baseline decides."""
    resting: bool
    """Whether the policy is left alone for a while after it failed."""
    fallbacks_by_reason: dict[str, int]
    decision_p50_us: float | None
    """Of the last thousand decisions."""
    decision_p99_us: float | None
    last_decisions_us: list[float]
    """Times of the last thousand decisions at most, oldest first, microseconds."""
    last_decisions_cpu_us: list[float]
    """What they computed, in microseconds of the processor; Ray's own are not among them."""


class BadRequest(ValueError):
    """A request that cannot be served as it is; the text says why."""

    def __init__(self, reason: str, status: int = 400, param: str | None = None) -> None:
        """Say why, with the HTTP status and the field."""
        super().__init__(reason)
        self.status = status
        self.param = param


class Generator:
    """Makes answers of bodies: tokenises, checks lengths, and writes what the gateway streams."""

    def __init__(self, gateway: Gateway, tokenizer: Tokenizer) -> None:
        """Serve by `gateway`."""
        self._gateway = gateway
        self._tokenizer = tokenizer

    async def complete(self, body: CompletionBody, class_header: str | None) -> Response:
        """Answer a completion."""
        if body.text is not None:
            token_ids = await self._encode(len(body.text), self._tokenizer.encode, body.text)
        else:
            token_ids = [one for one in body.prompt if isinstance(one, int)]
            size = self._tokenizer.vocab_size
            if size is not None and max(token_ids) >= size:
                raise BadRequest(
                    f"token {max(token_ids)} is not in the vocabulary of {size}", param="prompt"
                )
        request = self._request("cmpl", body, token_ids, body.text, None)
        write = _CompletionWriter(request.request_id, body, len(request.token_ids))
        return await self._answer(request, body, class_header, write)

    async def chat(self, body: ChatBody, class_header: str | None) -> Response:
        """Answer a chat completion."""
        conversation = body.conversation
        size = sum(len(one["content"]) for one in conversation)
        token_ids = await self._encode(size, self._tokenizer.encode_chat, conversation)
        request = self._request("chatcmpl", body, token_ids, None, conversation)
        write = _ChatWriter(request.request_id, body, len(request.token_ids))
        return await self._answer(request, body, class_header, write)

    async def _encode(self, size: int, encode: Callable[[Any], list[int]], text: Any) -> list[int]:
        return await asyncio.to_thread(encode, text) if size > _LONG_TEXT else encode(text)

    def _request(
        self,
        kind: str,
        body: GenerationBody,
        token_ids: list[int],
        prompt: str | None,
        messages: tuple[dict[str, str], ...] | None,
    ) -> GenerationRequest:
        cluster = self._gateway.cluster
        if body.model != cluster.served_model:
            raise BadRequest(
                f"model {body.model!r} is not served here; {cluster.served_model!r} is", 404,
                "model",
            )  # fmt: skip
        return GenerationRequest(
            request_id=f"{kind}-{uuid.uuid4().hex}",
            token_ids=tuple(token_ids or [0]),
            sampling=Sampling(
                max_tokens=self._max_tokens(body, len(token_ids)),
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                # Generators of random numbers take no negative ones.
                seed=None if body.seed is None else body.seed & _LARGEST_SEED,
                ignore_eos=body.ignore_eos,
            ),
            stop=body.stops,
            prompt=prompt,
            messages=messages,
        )

    def _max_tokens(self, body: GenerationBody, num_prompt: int) -> int:
        limits, longest = self._gateway.cluster.limits, self._gateway.cluster.max_model_tokens
        if num_prompt > limits.max_prompt_tokens:
            raise BadRequest(
                f"the prompt has {num_prompt} tokens; at most {limits.max_prompt_tokens} are taken",
                param="prompt",
            )
        wanted = body.wanted_tokens
        if wanted is not None and wanted > limits.max_output_tokens:
            raise BadRequest(
                f"max_tokens {wanted} is more than {limits.max_output_tokens}", param="max_tokens"
            )
        room = longest - num_prompt
        if room < (wanted or 1):
            raise BadRequest(
                f"prompt and answer of {num_prompt} + {wanted or 1} tokens are longer than the "
                f"model's {longest}",
                param="max_tokens",
            )
        return wanted or min(limits.default_output_tokens, limits.max_output_tokens, room)

    def _class(self, body: GenerationBody, header: str | None) -> SloClass:
        name = body.class_name or header
        found = self._gateway.service_class(name)
        if found is None:
            known = [one.name for one in self._gateway.cluster.classes]
            raise BadRequest(
                f"service_tier {name!r} is not known; choose one of {known}", param="service_tier"
            )
        return found

    async def _answer(
        self,
        request: GenerationRequest,
        body: GenerationBody,
        header: str | None,
        write: _Writer,
    ) -> Response:
        service_class = self._class(body, header)
        chunks = self._gateway.serve(request, service_class)
        headers = {"x-request-id": request.request_id}
        if not body.stream:
            async with aclosing(chunks):
                texts = []
                async for chunk in chunks:
                    texts.append(chunk.text)
            answer = write.whole("".join(texts), chunk)
            return JSONResponse(answer.model_dump(exclude_none=True), headers=headers)
        # A refusal must be known before the status is sent.
        first = await anext(chunks)
        return StreamingResponse(
            _events(first, chunks, write),
            media_type="text/event-stream",
            headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"},
        )


class _Writer:
    """Writes deltas as OpenAI's JSON."""

    def __init__(self, request_id: str, body: GenerationBody, prompt_tokens: int) -> None:
        options = body.stream_options
        self.include_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        self._prompt_tokens = prompt_tokens
        self._head = {"id": request_id, "created": int(time.time()), "model": body.model}

    def usage(self, chunk: GenerationChunk) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=chunk.num_tokens,
            total_tokens=self._prompt_tokens + chunk.num_tokens,
        )

    def whole(self, text: str, last: GenerationChunk) -> BaseModel:
        raise NotImplementedError

    def choice(self, chunk: GenerationChunk) -> dict[str, Any]:
        raise NotImplementedError

    kind = ""

    def event(self, chunk: GenerationChunk) -> str:
        event = {**self._head, "object": self.kind, "choices": [self.choice(chunk)]}
        if self.include_usage:
            event["usage"] = self.usage(chunk).model_dump() if self._continuous else None
        return _sse(event)

    def last_event(self, chunk: GenerationChunk) -> str:
        usage = self.usage(chunk).model_dump()
        return _sse({**self._head, "object": self.kind, "choices": [], "usage": usage})


class _CompletionWriter(_Writer):
    kind = "text_completion"

    def whole(self, text: str, last: GenerationChunk) -> BaseModel:
        choice = CompletionChoice(text=text, finish_reason=_reason(last))
        return CompletionAnswer(**self._head, choices=[choice], usage=self.usage(last))

    def choice(self, chunk: GenerationChunk) -> dict[str, Any]:
        return {
            "index": 0, "text": chunk.text, "finish_reason": _reason(chunk), "logprobs": None,
        }  # fmt: skip


class _ChatWriter(_Writer):
    kind = "chat.completion.chunk"

    def __init__(self, request_id: str, body: GenerationBody, prompt_tokens: int) -> None:
        super().__init__(request_id, body, prompt_tokens)
        self._began = False

    def whole(self, text: str, last: GenerationChunk) -> BaseModel:
        message = AssistantMessage(content=text)
        choice = ChatChoice(message=message, finish_reason=_reason(last))
        return ChatAnswer(**self._head, choices=[choice], usage=self.usage(last))

    def choice(self, chunk: GenerationChunk) -> dict[str, Any]:
        said: dict[str, str] = {"content": chunk.text} if chunk.text else {}
        if not self._began:
            self._began = True
            said = {"role": "assistant", "content": chunk.text}
        return {"index": 0, "delta": said, "finish_reason": _reason(chunk), "logprobs": None}


def _reason(chunk: GenerationChunk) -> Any:
    return "stop" if chunk.finish_reason == "abort" else chunk.finish_reason


def _sse(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"


async def _events(
    first: GenerationChunk, chunks: AsyncGenerator[GenerationChunk, None], write: _Writer
) -> AsyncIterator[str]:
    last = first
    async with aclosing(chunks):
        try:
            yield write.event(first)
            async for last in chunks:
                if last.text or last.finish_reason is not None:
                    yield write.event(last)
        except Unserved as error:
            yield _sse({"error": _error(str(error), "server_error")})
            return
        if write.include_usage:
            yield write.last_event(last)
        yield "data: [DONE]\n\n"


def _error(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": param, "code": None}


def _speaks_openai(request: Request) -> bool:
    return get_route_path(request.scope).startswith(_OPENAI)


def _problem(request: Request, message: str, status: int, param: str | None = None) -> JSONResponse:
    """Say what is wrong, in the form that the route's clients expect."""
    if not _speaks_openai(request):
        return JSONResponse({"detail": message}, status_code=status)
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return JSONResponse({"error": _error(message, kind, param)}, status_code=status)


def _install_problems(api: FastAPI) -> None:
    """Make every error one sentence, and OpenAI's envelope where its clients look for it."""
    errors.install(api)
    handle_invalid = api.exception_handlers[RequestValidationError]

    async def on_bad(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, BadRequest)
        return _problem(request, str(error), error.status, error.param)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        if _speaks_openai(request):
            return _problem(request, errors.reason_of(error.errors()), 400)
        answer: Awaitable[Response] = handle_invalid(request, error)  # type: ignore[assignment]
        return await answer

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = _problem(request, str(error.detail), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    async def on_denied(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Denied)
        answer = _problem(request, str(error), error.status)
        if error.status == 401:
            answer.headers["www-authenticate"] = "Bearer"
        return answer

    async def on_refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refused)
        answer = _problem(request, str(error), 429)
        answer.headers["retry-after"] = str(error.retry_after_s)
        return answer

    async def on_unserved(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Unserved)
        return _problem(request, str(error), 503)

    api.add_exception_handler(BadRequest, on_bad)
    api.add_exception_handler(RequestValidationError, on_invalid)
    api.add_exception_handler(HTTPException, on_http)
    api.add_exception_handler(Denied, on_denied)
    api.add_exception_handler(Refused, on_refused)
    api.add_exception_handler(Unserved, on_unserved)


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "Bad input"},
    401: {"model": ErrorAnswer, "description": "Token missing or wrong"},
    404: {"model": ErrorAnswer, "description": "Unknown model"},
    413: {"model": ErrorAnswer, "description": "Body too large"},
    429: {"model": ErrorAnswer, "description": "Too much in flight; see Retry-After"},
    503: {"model": ErrorAnswer, "description": "No replica could answer"},
}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 413, 422)
}


def create_gateway_api(
    gateway: Gateway,
    tokenizer: Tokenizer,
    access: Access,
    start: Callable[[], None] = lambda: None,
    stop: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """Lay the HTTP routes over a gateway.

    Args:
        gateway: Serves requests.
        tokenizer: Of the model that is served.
        access: Who may ask.
        start: Called on the event loop before the first request.
        stop: Called after the last.
    """
    generator, router = Generator(gateway, tokenizer), _RouteOnly(gateway)
    lifecycle = Lifecycle(gateway.manager)
    started_s = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        start()
        yield
        if stop is not None:
            await stop()

    # The usual documentation pages load scripts from the network; /docs is plain HTML instead.
    api = FastAPI(title="Tokenyard gateway", lifespan=lifespan, docs_url=None, redoc_url=None)
    _install_problems(api)
    may_use, may_change = [Depends(access.may_use)], [Depends(access.may_change)]

    @api.post(
        "/v1/completions", dependencies=may_use, response_model=CompletionAnswer, responses=_ERRORS
    )
    async def completions(body: CompletionBody, service_tier: _ClassHeader = None) -> Response:
        """Continue a prompt; `stream: true` gives server-sent events."""
        return await generator.complete(body, service_tier)

    @api.post(
        "/v1/chat/completions", dependencies=may_use, response_model=ChatAnswer, responses=_ERRORS
    )
    async def chat_completions(body: ChatBody, service_tier: _ClassHeader = None) -> Response:
        """Answer a conversation; `stream: true` gives server-sent events."""
        return await generator.chat(body, service_tier)

    def card() -> ModelCard:
        cluster = gateway.cluster
        return ModelCard(
            id=cluster.served_model, created=started_s, max_model_len=cluster.max_model_tokens
        )

    @api.get("/v1/models", dependencies=may_use, responses={401: _ERRORS[401]})
    async def models() -> ModelList:
        """List the model that is served."""
        return ModelList(data=[card()])

    @api.get(
        "/v1/models/{model:path}", dependencies=may_use,
        responses={status: _ERRORS[status] for status in (400, 401, 404)},
    )  # fmt: skip
    async def model(model: str) -> ModelCard:
        """Describe the model that is served."""
        if model != gateway.cluster.served_model:
            raise BadRequest(f"model {model!r} is not served here", 404)
        return card()

    @api.post("/v1/route", dependencies=may_use, responses=_PROBLEMS)
    async def route(message: RouteMessage) -> RouteAnswer:
        """Choose among replicas that the caller describes; nothing is sent to them."""
        return router.service().route(message)

    @api.get("/v1/policy", dependencies=may_use, responses={401: {"model": Problem}})
    async def policy() -> GatewayPolicyAnswer:
        """Describe the policy that decides, and count what it did."""
        return describe(gateway)

    @api.post("/v1/policy", dependencies=may_change, responses=_PROBLEMS)
    @api.put("/v1/policy", dependencies=may_change, responses=_PROBLEMS)
    async def change(body: PolicyChange) -> GatewayPolicyAnswer:
        """Let another policy decide from now on."""
        explore = body.explore_fraction
        if explore is None:
            explore = gateway.cluster.explore_fraction
        try:
            prepared = None
            if body.policy != RAY_DEFAULT:
                # Off the event loop: it may take seconds to find, load and compile.
                prepared = await asyncio.to_thread(gateway.manager.prepare, body.policy)
            gateway.manager.switch(body.policy, explore, prepared=prepared)
        except (ValueError, OSError) as error:
            raise BadRequest(" ".join(str(error).split()), 422) from None
        return describe(gateway)

    @api.get("/v1/policies", dependencies=may_use, responses={401: {"model": Problem}})
    async def policies() -> PoliciesAnswer:
        """Say who decides, who did before, and how the trial goes."""
        return lifecycle.describe()

    @api.post(
        "/v1/policies", dependencies=may_change, responses={**_PROBLEMS, 409: {"model": Problem}}
    )
    async def change_policies(body: PoliciesChange) -> PoliciesAnswer:
        """Put a policy on trial, end the trial, promote what is on trial, or roll back."""
        try:
            return await lifecycle.change(body)
        except Conflict as error:
            raise BadRequest(" ".join(str(error).split()), 409) from None
        except (ValueError, OSError) as error:
            raise BadRequest(" ".join(str(error).split()), 422) from None

    @api.get("/v1/history", dependencies=may_use, responses={401: {"model": Problem}})
    async def history() -> dict[str, Any]:
        """Tell of the last quarter of an hour, and of the last decisions with their scores."""
        return {
            "now_s": gateway.refresh(),
            "in_flight": gateway.in_flight,
            "bins": gateway.history.rows(),
            "decisions": gateway.history.decisions(),
        }

    @api.get("/v1/pools", dependencies=may_use, responses={401: {"model": Problem}})
    async def pools() -> dict[str, Any]:
        """Tell what is known of every replica: speed, state and its age."""
        now_s = gateway.refresh()
        return {"replicas": [_describe_replica(gateway, one, now_s) for one in _tracked(gateway)]}

    @api.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """Say that the gateway is there, and how many replicas it knows."""
        gateway.refresh()
        return {"status": "ok", "replicas": len(gateway.table.replicas)}

    @api.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Everything that is counted, for Prometheus."""
        gateway.observe()
        return Response(gateway.metrics.exposition(), media_type="text/plain; version=0.0.4")

    page = resources.files("serve_app").joinpath("http/dashboard.html").read_text(encoding="utf-8")

    @api.get("/", include_in_schema=False)
    async def watch() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_MAY})

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(documentation(api.openapi()))

    return api


class _RouteOnly:
    """The active policy for those who only ask, with a memory of its own."""

    def __init__(self, gateway: Gateway) -> None:
        self._manager = gateway.manager
        self._loaded = self._manager.loaded
        self._service = self._make()

    def service(self) -> RoutingService:
        if self._loaded is not self._manager.loaded:
            self._loaded, self._service = self._manager.loaded, self._make()
        return self._service

    def _make(self) -> RoutingService:
        return RoutingService(Decider(self._manager.loaded, np.random.default_rng()))


def describe(gateway: Gateway) -> GatewayPolicyAnswer:
    """Say what decides and what has happened since the start."""
    manager, log = gateway.manager, gateway.log
    times = np.array(manager.decision_us)
    p50, p99 = np.percentile(times, [50, 99]).tolist() if len(times) else (None, None)
    card = manager.loaded.card.model_dump() | {"startup_fallback": manager.missing}
    return GatewayPolicyAnswer(
        **card,
        explore_fraction=manager.explore_fraction,
        num_decisions=manager.num_decisions,
        num_fallbacks=manager.fallbacks.total(),
        num_explored=manager.num_explored,
        num_log_lines_lost=0 if log is None else log.num_lost,
        active=manager.name,
        baseline=manager.baseline,
        missing=manager.missing,
        resting=manager.rests,
        fallbacks_by_reason=dict(manager.fallbacks),
        decision_p50_us=p50,
        decision_p99_us=p99,
        last_decisions_us=times.tolist(),
        last_decisions_cpu_us=list(manager.decision_cpu_us),
    )


def _tracked(gateway: Gateway) -> list[Any]:
    return list(gateway.table.replicas.values())


def _describe_replica(gateway: Gateway, replica: Any, now_s: float) -> dict[str, Any]:
    status = asdict(replica.status)
    observed_at_s = status.pop("observed_at_s")
    return {
        "replica_id": replica.replica_id,
        "pool": replica.pool,
        "profile": replica.profile.model_dump(),
        "published": status,
        "age_s": max(now_s - observed_at_s, 0.0),
        "in_flight": replica.in_flight.count,
        "prefill_in_flight_tokens": replica.in_flight.prefill_tokens,
        "output_in_flight_tokens": replica.in_flight.output_tokens,
    }


def documentation(schema: dict[str, Any]) -> str:
    """Write an OpenAPI schema as one page that needs nothing from elsewhere."""
    parts = [f"<h1>{html.escape(schema['info']['title'])}</h1>"]
    parts.append("<p>Machine-readable: <a href='/openapi.json'>/openapi.json</a></p>")
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body is not None:
                parts.append(f"<p>Body: {_reference(body['schema'])}</p>")
            statuses = ", ".join(sorted(operation["responses"]))
            parts.append(f"<p>Answers: {html.escape(statuses)}</p>")
    parts.append("<h1>Bodies</h1>")
    for name, model in sorted(schema.get("components", {}).get("schemas", {}).items()):
        parts.append(f"<h3 id='{html.escape(name)}'>{html.escape(name)}</h3>")
        text = html.escape(json.dumps(model, indent=1))
        parts.append(f"<details><summary>schema</summary><pre>{text}</pre></details>")
    style = "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    return (
        f"<!doctype html><meta charset='utf-8'><title>API</title><style>{style}</style>"
        + "\n".join(parts)
    )


def _reference(schema: dict[str, Any]) -> str:
    name = html.escape(schema.get("$ref", "").rpartition("/")[2])
    return f"<a href='#{name}'>{name}</a>" if name else html.escape(json.dumps(schema))
