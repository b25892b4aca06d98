"""Tokenizers, and how a stream of tokens becomes a stream of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from serve_app.engines.base import EngineError

_ESTIMATE_CHARACTERS = 4
_FACTORS = np.array([1, 0x110001, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_REPLACEMENT = "\ufffd"
"""The character that a tokenizer decodes incomplete bytes to."""


class Tokenizer(Protocol):
    """Texts to token ids and back."""

    @property
    def vocab_size(self) -> int | None:
        """All token ids are below it; None: it is not known."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Token ids of a conversation with tools, up to where the assistant's answer begins.

        Raises:
            ChatRefused: The model is not made for such a conversation.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""


class ChatRefused(ValueError):
    """The template of a model refuses a conversation; the text says why."""


class HuggingFaceTokenizer:
    """The tokenizer in a model's folder."""

    def __init__(self, folder: str) -> None:
        """Load it; a ValueError says that the folder holds none."""
        try:
            self._tokenizer: Any = _load(Path(folder))
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"model {folder} has no tokenizer: {first}") from None
        self._decode: Callable[..., str] = self._tokenizer.decode
        self._backend: Any = self._tokenizer.backend_tokenizer if self._tokenizer.is_fast else None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            if not self._tokenizer.clean_up_tokenization_spaces:
                # Each token of each answer is decoded twice, and what is around costs twice more.
                self._decode = self._backend.decode

    @property
    def vocab_size(self) -> int | None:
        """All token ids are below it."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._ids(text, add_special_tokens=True)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if self._backend is None:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Where each token stands in the text nobody asks, and it takes a third of the time.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            ids = encoding.ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Token ids of a conversation by the model's template, or a plain one where it has none.

        Many templates raise for a system's message, or for two of the same role in a row.
        """
        if self._tokenizer.chat_template is None:
            return self.encode(plain_chat(messages))
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ChatRefused(f"the model's chat template refuses them: {error}") from None
        return self._ids(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return self._decode(list(token_ids), skip_special_tokens=True)


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer of a model: a folder, a hub id or `default`.

    Raises:
        ValueError: There is none, or what reads it is not installed.
    """
    from serve_app.engines.models import find_model

    try:
        return HuggingFaceTokenizer(model if Path(model).is_dir() else str(find_model(model)))
    except (ImportError, EngineError) as error:
        raise ValueError(str(error)) from None


def _load(folder: Path) -> Any:
    """Load what transformers' `AutoTokenizer` would.

    It looks at the model too, and so imports torch: 4.5 s in place of 1 s, while nobody answers.
    """
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    # It takes a second to import, and servers that only decide do without it.
    if settings.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in settings:
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


class EstimatingTokenizer:
    """Counts four characters as a token, for models whose tokenizer is not known.

    For gateways before external pools only, whose endpoints tokenise themselves.
    """

    @property
    def vocab_size(self) -> int | None:
        """Not known."""
        return None

    def encode(self, text: str) -> list[int]:
        """Return a number for every four characters, equal for equal characters."""
        return list(EstimatedTokens(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Likewise, of all messages."""
        return self.encode(plain_chat(messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raise: estimated tokens have no text."""
        raise NotImplementedError("texts of external pools come decoded")


class EstimatedTokens(Sequence[int]):
    """A number for every four characters of a text, computed on access."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def _ids(self) -> list[int]:
        # The same in every process, unlike `hash`.
        codes = np.frombuffer(self._text.encode("utf-32-le", "surrogatepass"), np.uint32)
        whole = np.zeros(len(self) * _ESTIMATE_CHARACTERS, np.uint64)
        whole[: len(codes)] = codes
        ids: list[int] = (whole.reshape(-1, _ESTIMATE_CHARACTERS) @ _FACTORS).tolist()
        return ids

    def __len__(self) -> int:
        """Return the number of characters over four."""
        return -(-len(self._text) // _ESTIMATE_CHARACTERS)

    def __iter__(self) -> Iterator[int]:
        """Go through all numbers."""
        return iter(self._ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        """Return a number that is equal for equal characters."""
        return self._ids[at]


def plain_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """Write a conversation as text, for a model without a chat template."""
    lines = [f"{message['role']}: {message['content']}" for message in messages]
    return "\n".join([*lines, "assistant:"])


class Detokenizer:
    """Turns a stream of tokens into text that never has to be taken back.

    A character may take several tokens, and how a token reads may depend on the one before it: so
    a few tokens of context are decoded again each time, and an unfinished character is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._read = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that some tokens add; it may be empty."""
        self._ids.extend(token_ids)
        return self._take(hold=True)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._take(hold=False) if self._read < len(self._ids) else ""

    def _take(self, hold: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._read])
        text = self._tokenizer.decode(self._ids[self._context :])
        if len(text) <= len(before) or (hold and text.endswith(_REPLACEMENT)):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]


class StopFinder:
    """Cuts a stream of text at the first stop string, even one that spans several pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return the text that certainly precedes any stop string."""
        if not self._stops:
            return text
        self._held += text
        starts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if starts:
            self.found = True
            return self._release(min(starts))
        return self._release(len(self._held) - self._num_suspect())

    def finish(self) -> str:
        """Return the text that was held back as the possible beginning of a stop string."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _num_suspect(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-count:]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0
