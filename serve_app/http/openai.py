"""OpenAI's routes: completions, chat completions, models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi.responses import Response
from pydantic import BaseModel

from serve_app.cluster import SloClass
from serve_app.engines.base import Sampling
from serve_app.engines.tokenizer import Tokenizer
from serve_app.gateway.exchange import Generation, Headers, InferenceRequest
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import GenerationChunk, GenerationRequest, new_id
from serve_app.http.answering import Answering
from serve_app.http.auth import Access
from serve_app.http.errors import BadRequest
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

_LONG_TEXT = 4_000
"""Characters from which on a prompt is tokenised off the event loop."""
_LARGEST_SEED = 2**63 - 1
_ClassHeader = Annotated[str | None, Header(alias="x-service-tier", max_length=40)]
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "Bad input"},
    401: {"model": ErrorAnswer, "description": "Token missing or wrong"},
    404: {"model": ErrorAnswer, "description": "Unknown model"},
    413: {"model": ErrorAnswer, "description": "Body too large"},
    429: {"model": ErrorAnswer, "description": "Too much in flight; see Retry-After"},
    503: {"model": ErrorAnswer, "description": "No replica could answer"},
}


_JSON_HEADERS = [(b"content-type", b"application/json")]
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generator:
    """Makes generations of bodies: tokenises, checks lengths, and says how answers are written."""

    def __init__(self, gateway: Gateway, tokenizer: Tokenizer) -> None:
        """Serve by `gateway`."""
        self._gateway = gateway
        self._tokenizer = tokenizer

    async def read(self, path: str, fields: Mapping[str, Any]) -> Generation:
        """Read a body of one of OpenAI's routes.

        Raises:
            ValueError: Engines of ours do not answer this route, or not this body.
        """
        if path == "/v1/completions":
            return await self.completion(CompletionBody.model_validate(fields))
        if path == "/v1/chat/completions":
            return await self.chat(ChatBody.model_validate(fields))
        raise BadRequest(f"{path} is not served here", 404)

    async def answer(
        self, generation: Generation, body: GenerationBody, class_header: str | None
    ) -> Response:
        """Answer a body that was read."""
        wanted = generation.request
        request = InferenceRequest(
            wanted.request_id, wanted.token_ids, wanted.sampling.max_tokens, None, generation
        )
        service_class = find_class(self._gateway, body.class_name or class_header)
        return Answering(self._gateway, request, service_class)

    async def completion(self, body: CompletionBody) -> Generation:
        """Read a completion."""
        token_ids: Sequence[int]
        if body.text is not None:
            token_ids = await self._encode(len(body.text), self._tokenizer.encode, body.text)
        else:
            token_ids = [one for one in body.prompt if isinstance(one, int)]
            size = self._tokenizer.vocab_size
            if size is not None and max(token_ids) >= size:
                raise BadRequest(
                    f"token {max(token_ids)} is not in the vocabulary of {size}", param="prompt"
                )
        request = self._request("cmpl", body, token_ids)
        return Generation(request, _CompletionWriter(request, body))

    async def chat(self, body: ChatBody) -> Generation:
        """Read a chat completion."""
        conversation = body.conversation
        size = sum(len(one["content"]) for one in conversation)
        token_ids = await self._encode(size, self._tokenizer.encode_chat, conversation)
        request = self._request("chatcmpl", body, token_ids)
        return Generation(request, _ChatWriter(request, body))

    async def _encode(
        self, size: int, encode: Callable[[Any], Sequence[int]], text: Any
    ) -> Sequence[int]:
        return await asyncio.to_thread(encode, text) if size > _LONG_TEXT else encode(text)

    def _request(
        self, kind: str, body: GenerationBody, token_ids: Sequence[int]
    ) -> GenerationRequest:
        check_model(self._gateway, body.model)
        return GenerationRequest(
            request_id=f"{kind}-{new_id()}",
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


def find_class(gateway: Gateway, name: str | None) -> SloClass:
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


def check_model(gateway: Gateway, model: str) -> None:
    """Refuse a model that is not served.

    Raises:
        BadRequest: It is not.
    """
    served = gateway.cluster.served_model
    if model != served:
        raise BadRequest(f"model {model!r} is not served here; {served!r} is", 404, "model")


class _Writer:
    """Writes what an engine generates as OpenAI's JSON, at once or in events."""

    kind = ""

    def __init__(self, request: GenerationRequest, body: GenerationBody) -> None:
        options = body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        self._prompt_tokens = len(request.token_ids)
        self._head = {"id": request.request_id, "created": int(time.time()), "model": body.model}
        self._stream, self._texts = bool(body.stream), list[str]()
        self._last: GenerationChunk | None = None
        names = _EVENT_HEADERS if self._stream else _JSON_HEADERS
        self.headers: Headers = [*names, (b"x-request-id", request.request_id.encode())]

    def add(self, chunk: GenerationChunk) -> bytes:
        """Take what the answer grew by; return the event that says so, if there is one."""
        is_first, self._last = self._last is None, chunk
        if not self._stream:
            self._texts.append(chunk.text)
            return b""
        if not (is_first or chunk.text or chunk.finish_reason is not None):
            return b""
        event = {**self._head, "object": self.kind, "choices": [self.choice(chunk)]}
        if self._include_usage:
            event["usage"] = self.usage(chunk).model_dump() if self._continuous else None
        return _sse(event)

    def finish(self) -> bytes:
        """Return the last events, or all of the answer."""
        last = self._last
        assert last is not None
        if not self._stream:
            answer = self.whole("".join(self._texts), last)
            return answer.model_dump_json(exclude_none=True).encode()
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        usage = self.usage(last).model_dump()
        event = {**self._head, "object": self.kind, "choices": [], "usage": usage}
        return _sse(event) + b"data: [DONE]\n\n"

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

    def __init__(self, request: GenerationRequest, body: GenerationBody) -> None:
        super().__init__(request, body)
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


def _sse(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()


def make_router(gateway: Gateway, tokenizer: Tokenizer, access: Access) -> APIRouter:
    """Lay OpenAI's routes over a gateway.

    Args:
        gateway: Serves requests.
        tokenizer: Of the model that is served.
        access: Who may ask.
    """
    router, generator = APIRouter(), Generator(gateway, tokenizer)
    is_authorized, started_s = [Depends(access.is_authorized)], int(time.time())

    @router.post(
        "/v1/completions",
        dependencies=is_authorized,
        response_model=CompletionAnswer,
        responses=_ERRORS,
    )
    async def completions(body: CompletionBody, service_tier: _ClassHeader = None) -> Response:
        """Continue a prompt; `stream: true` gives server-sent events."""
        return await generator.answer(await generator.completion(body), body, service_tier)

    @router.post(
        "/v1/chat/completions",
        dependencies=is_authorized,
        response_model=ChatAnswer,
        responses=_ERRORS,
    )
    async def chat_completions(body: ChatBody, service_tier: _ClassHeader = None) -> Response:
        """Answer a conversation; `stream: true` gives server-sent events."""
        return await generator.answer(await generator.chat(body), body, service_tier)

    def card() -> ModelCard:
        cluster = gateway.cluster
        return ModelCard(
            id=cluster.served_model, created=started_s, max_model_len=cluster.max_model_tokens
        )

    @router.get("/v1/models", dependencies=is_authorized, responses={401: _ERRORS[401]})
    async def models() -> ModelList:
        """List the model that is served."""
        return ModelList(data=[card()])

    @router.get(
        "/v1/models/{model:path}", dependencies=is_authorized,
        responses={status: _ERRORS[status] for status in (400, 401, 404)},
    )  # fmt: skip
    async def model(model: str) -> ModelCard:
        """Describe the model that is served."""
        if model != gateway.cluster.served_model:
            raise BadRequest(f"model {model!r} is not served here", 404)
        return card()

    return router
