"""A file that may change while it is used: what it held when it was last whole counts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import yaml
from pydantic import ValidationError

from tokenyard.config import FrozenModel

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_MAX_FILE_BYTES = 16 << 20
T = TypeVar("T")
_Message = TypeVar("_Message", bound=FrozenModel)


class WatchedFile(Generic[T]):
    """A file that is read again when it changes."""

    def __init__(
        self, path: Path, what: str, value: T, read: Callable[[Path], T],
        difference: Callable[[T, T], str],
    ) -> None:  # fmt: skip
        """Name it; nothing is read yet, since it may be another machine's.

        `what` is what messages call its contents, and `value` counts before they are read. A
        ValueError of `read` says why it cannot be used. `difference` compares a value with the one
        before.
        """
        self.path, self.value = path, value
        self.problem: str | None = None
        """Why the file cannot be used as it is now, so that what it held before counts."""
        self.difference = ""
        """What the last reading changed."""
        self._what, self._read, self._compare = what, read, difference
        self._seen: object = None

    def open(self) -> None:
        """Read it for the first time.

        Raises:
            ValueError: It cannot be used.
        """
        self._seen = self._identity()
        self.value = self._read(self.path)

    def _identity(self) -> object:
        """What changes with the file; None: it is not there."""
        return identity_of(self.path)

    def reload(self) -> bool:
        """Read it again if it is another than before; return whether there is news.

        One that cannot be used changes nothing but `problem`. It is read until it can be: what was
        in the way may go, and leave the file as it is.
        """
        seen, before = self._identity(), self.value
        if seen is not None and seen == self._seen and self.problem is None:
            return False
        try:
            self.value = self._read(self.path)
        except ValueError as error:
            last, self.problem = self.problem, str(error)
            if self.problem != last:
                logger.error("%s; the %s from before still count", error, self._what)
            return self.problem != last
        self._seen, self.problem = seen, None
        self.difference = self._compare(before, self.value)
        logger.info("%s read from %s: %s", self._what, self.path, self.difference)
        return True

    async def watch(self, on_change: Callable[[], None] | None = None) -> None:
        """Look every second, without end, whether it has changed; `on_change` is then called."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            # In a thread: much takes a while to read.
            if await asyncio.to_thread(self.reload) and on_change is not None:
                on_change()


def read_message(path: Path, model: type[_Message], what: str) -> _Message:
    """Read a YAML file.

    Raises:
        ValueError: It cannot be read, or is not as `model`; the text names it and why.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{what} file {path}: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{what} file {path} is larger than {_MAX_FILE_BYTES} bytes")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return model.model_validate(yaml.load(data, loader))
    except ValidationError as error:
        # The value may be a secret that somebody wrote in the wrong place.
        first = error.errors(include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{what} file {path}: {field or 'it'}: {first['msg']}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML has lookups fail where a tag has a value of another kind.
        place = getattr(error, "problem_mark", None)
        where = "" if place is None else f", line {place.line + 1}"
        raise ValueError(f"{what} file {path} is no YAML{where}") from None


def identity_of(path: Path) -> tuple[int, ...] | None:
    """What changes with a file; None: it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
