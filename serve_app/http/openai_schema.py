"""The parts of OpenAI's bodies that are understood here.

Fields that nothing here depends on are accepted; those that would change an answer and are not
supported are refused in one sentence, unless they ask for what happens anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from serve_app.http.body import Body

MAX_STOPS = 16
MAX_MESSAGES = 1024

_Text = Annotated[str, Field(max_length=1 << 20)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_TokenId = Annotated[int, Field(ge=0, le=10_000_000)]
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
}
"""Fields that are not supported, and the values that ask for nothing."""


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool = False
    """Whether a last event tells how many tokens there were."""
    continuous_usage_stats: bool = False
    """Whether every event does (vLLM)."""


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """0: always the likeliest token; absent: 1."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Generate `max_tokens` whatever is drawn (vLLM); what replays of a trace need."""
    service_tier: Annotated[str, Field(max_length=40)] | None = None
    """Class of the request; absent, `auto` or `default`: the first."""
    priority: Annotated[str, Field(max_length=40)] | None = None
    """The same by another name."""
    user: Annotated[str, Field(max_length=1024)] | None = None
    """Ignored, as are the next."""
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in _UNSUPPORTED.items():
            if name in data and data[name] is not None and data[name] not in neutral:
                raise ValueError(f"{name} is not supported")
        return {key: value for key, value in data.items() if key not in _UNSUPPORTED}

    @property
    def wanted_tokens(self) -> int | None:
        """Longest answer that the request allows, tokens."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings at which the answer is cut."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: (
        _Text
        | Annotated[list[_TokenId], Field(min_length=1, max_length=1 << 20, fail_fast=True)]
        | Annotated[list[_Text], Field(min_length=1, max_length=1, fail_fast=True)]
    )
    """A text, its token ids, or a list of one text."""

    @property
    def text(self) -> str | None:
        """The prompt as text; None: it is token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return first if isinstance(first, str) else None


class TextPart(Body):
    """A text in a message."""

    type: Literal["text"]
    text: _Text


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text | Annotated[list[TextPart], Field(min_length=1, max_length=64, fail_fast=True)]
    name: Annotated[str, Field(max_length=256)] | None = None

    @property
    def text(self) -> str:
        """Its whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """OpenAI's newer name of `max_tokens`."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """Longest answer that the request allows, tokens."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def conversation(self) -> tuple[dict[str, str], ...]:
        """Roles and texts of all messages."""
        roles = {"developer": "system"}
        return tuple(
            {"role": roles.get(message.role, message.role), "content": message.text}
            for message in self.messages
        )


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """The answer of a completion."""

    index: int = 0
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: None = None


class CompletionAnswer(BaseModel):
    """Answer of `POST /v1/completions`; events of a stream look alike."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AssistantMessage(BaseModel):
    """The message of the model."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """The answer of a chat completion."""

    index: int = 0
    message: AssistantMessage
    finish_reason: Literal["stop", "length"] | None
    logprobs: None = None


class ChatAnswer(BaseModel):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    """One model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tokenyard"
    max_model_len: int | None = Field(None, exclude_if=lambda length: length is None)
    """Longest prompt plus output, tokens (vLLM); left out where no endpoint says."""
    parent: str | None = None
    """Model that it is an adapter of (vLLM); None: it is none."""


class ModelList(BaseModel):
    """Answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    """One sentence."""
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """OpenAI's form of every error."""

    error: ErrorDetail
