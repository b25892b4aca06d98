"""Bodies of OpenAI's routes, checked and tokenised for our engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from serve_app.cluster import Limits
from serve_app.engines.base import Generation, Sampling
from serve_app.engines.tokenizer import ChatRefused, Tokenizer
from serve_app.http.openai_schema import ChatBody, CompletionBody, GenerationBody
from serve_app.http.reasons import BadRequest, reason_of

_LONG_TEXT = 4_000
"""Characters from which on a prompt is tokenised off the event loop."""
_LARGEST_SEED = 2**63 - 1
_SHAPING = frozenset(
    ("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message",
     "documents"),
)  # fmt: skip
"""Fields of vLLM's that change what its template writes."""


class GenerationReader:
    """Reads bodies: tokenises prompts, and checks lengths."""

    def __init__(
        self, tokenizer: Tokenizer, served_model: str, limits: Limits, longest_tokens: int
    ) -> None:
        self._tokenizer, self._served_model = tokenizer, served_model
        self._limits, self._longest_tokens = limits, longest_tokens

    async def read(self, path: str, fields: Mapping[str, Any]) -> Generation:
        """Read a body of an OpenAI route; BadRequest: our engines cannot answer it."""
        body: GenerationBody
        try:
            if path == "/v1/completions":
                body = CompletionBody.model_validate(fields)
            elif path == "/v1/chat/completions":
                body = ChatBody.model_validate(fields)
            else:
                raise BadRequest(f"{path} is not served here", 404)
        except ValidationError as error:
            # As FastAPI names the places of other routes.
            problems = [
                {**problem, "loc": ("body", *problem["loc"])}
                for problem in error.errors(include_url=False)
            ]
            raise BadRequest(reason_of(problems)) from None
        if body.model != self._served_model:
            text = f"model {body.model!r} is not served here; {self._served_model!r} is"
            raise BadRequest(text, 404, "model")
        ids, options = await self._tokens(body), body.stream_options
        return Generation(
            ids or [0], self._sampling(body, len(ids)), body.model, isinstance(body, ChatBody),
            bool(body.stream), body.stops, options is not None and options.include_usage,
            options is not None and options.continuous_usage_stats, body.wanted_tokens is None,
        )  # fmt: skip

    async def _tokens(self, body: GenerationBody) -> Sequence[int]:
        if isinstance(body, ChatBody):
            conversation = body.conversation
            size = sum(len(message["content"]) for message in conversation)
            try:
                return await _encode(size, self._tokenizer.encode_chat, conversation)
            except ChatRefused as error:
                raise BadRequest(f"messages: {error}", param="messages") from None
        assert isinstance(body, CompletionBody)
        if body.text is not None:
            return await _encode(len(body.text), self._tokenizer.encode, body.text)
        token_ids = [token for token in body.prompt if isinstance(token, int)]
        num_known, largest = self._tokenizer.vocab_size, max(token_ids)
        if num_known is not None and largest >= num_known:
            reason = f"token {largest} is not in the vocabulary of {num_known}"
            raise BadRequest(reason, param="prompt")
        return token_ids

    def _sampling(self, body: GenerationBody, num_prompt: int) -> Sampling:
        return Sampling(
            max_tokens=self._max_tokens(body, num_prompt),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            # Generators of random numbers take no negative ones.
            seed=None if body.seed is None else body.seed & _LARGEST_SEED,
            ignore_eos=body.ignore_eos,
        )

    def _max_tokens(self, body: GenerationBody, num_prompt: int) -> int:
        limits, longest = self._limits, self._longest_tokens
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


async def tokens_of(
    path: str, fields: Mapping[str, Any], text: str, tokenizer: Tokenizer
) -> Sequence[int]:
    """Tokenise a prompt as an endpoint does, as far as that is clear; else all of its `text`."""
    prompt = fields.get("prompt")
    if path == "/v1/completions" and isinstance(prompt, str):
        return await _encode(len(prompt), tokenizer.encode, prompt)
    if path == "/v1/chat/completions" and not _SHAPING & fields.keys():
        # Nobody has checked the messages, and a template may fail in any way.
        with contextlib.suppress(Exception):
            encode = partial(tokenizer.encode_chat, tools=fields.get("tools"))
            return await _encode(len(text), encode, [*map(_plain, fields["messages"])])
    return await _encode(len(text), tokenizer.encode, text)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: with one text, and with arguments that are read."""
    plain, content = {**message}, message.get("content")
    if isinstance(content, list):
        (part,) = content
        plain["content"] = part["text"]
    if calls := message.get("tool_calls"):
        functions = [{**call["function"]} for call in calls]
        for function in functions:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        pairs = zip(calls, functions, strict=True)
        plain["tool_calls"] = [{**call, "function": function} for call, function in pairs]
    return plain


async def _encode(size: int, encode: Callable[[Any], Sequence[int]], text: Any) -> Sequence[int]:
    return await asyncio.to_thread(encode, text) if size > _LONG_TEXT else encode(text)
