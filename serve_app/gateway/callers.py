"""Who asks: API keys by their hashes, and the file of them, which is read anew when it changes.

A key is drawn at random with 256 bits, so its SHA-256 tells nothing about it and needs no salt.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from tokenyard.config import FrozenModel

logger = logging.getLogger(__name__)

TOKEN = "token"
"""Name of the key that is the one token of all callers."""
ADMIN_TOKEN = "admin-token"
"""Name of the key that is the token of changes."""
_LOOK_EVERY_S = 1.0
_MAX_FILE_BYTES = 16 << 20
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]
_Limit = Annotated[int, Field(ge=1, le=10**12)] | None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as it is known."""

    tenant: str = ""
    """Of the key; empty: there is no key, or its file names no tenant."""
    key: str = ""
    """Name of the key; empty: there is none."""
    address: str = ""
    """Where the connection comes from, which may be a proxy; empty: nobody has to know."""
    models: frozenset[str] | None = None
    """Models that may be asked; None: all."""


ANYBODY = Caller()


class CallerLimits(FrozenModel):
    """What a caller may ask for; None: as much as there is.

    Minutes are token buckets that hold one minute's worth. Days are those of UTC. Tokens are those
    of prompts and answers.
    """

    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    requests_per_day: _Limit = None
    tokens_per_day: _Limit = None

    @property
    def are_none(self) -> bool:
        """Whether nothing is limited."""
        return self == UNLIMITED


UNLIMITED = CallerLimits()


class ApiKey(FrozenModel):
    """A key, without the key itself."""

    name: _Name
    """Whom logs name; no two keys have the same."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the key, in hex."""
    tenant: _Name | None = None
    """Whose requests are counted together."""
    admin: bool = False
    """Whether it changes what is served."""
    may_generate: bool | None = None
    """Whether it asks models; None: unless it is an admin's."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Models that it may ask; None: all."""
    limits: CallerLimits = UNLIMITED

    @model_validator(mode="after")
    def _names_a_tenant(self) -> Self:
        if not self.admin and self.tenant is None:
            raise ValueError("give the tenant of a key that is no admin's")
        return self

    @classmethod
    def of_token(cls, name: str, token: str, admin: bool = False) -> ApiKey:
        """Make the key that is a token from the environment: of no tenant, without limits."""
        return cls.model_construct(
            name=name, sha256=hash_of(token), tenant=None, admin=admin, may_generate=True,
            models=None, limits=UNLIMITED,
        )  # fmt: skip

    @property
    def generates(self) -> bool:
        """Whether it asks models."""
        return not self.admin if self.may_generate is None else self.may_generate


class KeysMessage(FrozenModel):
    """A file of keys."""

    keys: tuple[ApiKey, ...] = ()
    without_key: CallerLimits | None = None
    """What each address may ask for without a key; None: nothing."""

    @model_validator(mode="after")
    def _are_distinct(self) -> Self:
        for what, values in (
            ("name", [one.name for one in self.keys]),
            ("sha256", [one.sha256 for one in self.keys]),
        ):
            if len(set(values)) < len(values):
                twice = min(one for one in set(values) if values.count(one) > 1)
                raise ValueError(f"{what} {twice!r} appears more than once")
        reserved = {TOKEN, ADMIN_TOKEN}.intersection(one.name for one in self.keys)
        if reserved:
            raise ValueError(f"name {min(reserved)!r} is the environment's")
        return self


def hash_of(key: str) -> str:
    """Return the SHA-256 of a key, as files have it."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Keys, found by what a caller gives."""

    def __init__(self, keys: Iterable[ApiKey], without_key: CallerLimits | None = None) -> None:
        """Hold keys.

        Args:
            keys: All of them.
            without_key: What each address may ask for without one; None: nothing.
        """
        self.by_name = {one.name: one for one in keys}
        self.without_key = without_key
        self.limits = {
            name: None if one.limits.are_none else one.limits for name, one in self.by_name.items()
        }
        self.tenants = frozenset(one.tenant for one in self.by_name.values() if one.tenant)
        self._by_hash = {bytes.fromhex(one.sha256): one for one in self.by_name.values()}

    def find(self, given: str) -> ApiKey | None:
        """Return the key that a caller gives; None: there is no such key.

        How long this takes depends on the hash of what is given, from which nobody can steer
        towards a key that has another.
        """
        digest = hashlib.sha256(given.encode()).digest()
        found = self._by_hash.get(digest)
        if found is None or not hmac.compare_digest(bytes.fromhex(found.sha256), digest):
            return None
        return found


class KeyFile:
    """A file of keys, and what it held when it was last whole."""

    def __init__(self, path: Path) -> None:
        """Name it; nothing is read yet, since it may be another machine's."""
        self.path = path
        self.ring = KeyRing(())
        self.problem: str | None = None
        """Why the file cannot be used as it is now, so that what it held before counts."""
        self.difference = ""
        """What the last reading has changed."""
        self._seen: tuple[int, ...] | None = None

    def open(self) -> None:
        """Read it for the first time.

        Raises:
            ValueError: It cannot be used.
        """
        self._seen = identity_of(self.path)
        self.ring = read_keys(self.path)

    def reload(self) -> bool:
        """Read it again if it is another than before; return whether there is news.

        One that cannot be used changes nothing but `problem`. It is read until it can be: what was
        in the way may go, and leave the file as it is.
        """
        seen, before = identity_of(self.path), self.ring
        if seen == self._seen and self.problem is None:
            return False
        try:
            self.ring = read_keys(self.path)
        except ValueError as error:
            told, self.problem = self.problem, str(error)
            if self.problem != told:
                logger.error("%s; the keys from before still count", error)
            return self.problem != told
        self._seen, self.problem = seen, None
        self.difference = _difference(before, self.ring)
        logger.info("keys read from %s: %s", self.path, self.difference)
        return True

    async def watch(self, on_change: Callable[[], None] | None = None) -> None:
        """Look every second whether it has changed, without end.

        Args:
            on_change: Called after it was read again, or could not be.
        """
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            # In a thread: many keys take a while to read.
            if await asyncio.to_thread(self.reload) and on_change is not None:
                on_change()


def read_keys(path: Path) -> KeyRing:
    """Read a file of keys.

    Raises:
        ValueError: It cannot be read, or is not as `KeysMessage`; the text names it and why.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"keys file {path}: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"keys file {path} is larger than {_MAX_FILE_BYTES} bytes")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found = KeysMessage.model_validate(yaml.load(data, loader))
    except ValidationError as error:
        # The value may be a key that somebody wrote in place of its hash.
        first = error.errors(include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"keys file {path}: {field or 'it'}: {first['msg']}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML has lookups fail where a tag has a value of another kind.
        place = getattr(error, "problem_mark", None)
        where = "" if place is None else f", line {place.line + 1}"
        raise ValueError(f"keys file {path} is no YAML{where}") from None
    return KeyRing(found.keys, found.without_key)


def _difference(old: KeyRing, new: KeyRing) -> str:
    """Say which keys are other ones now."""
    was, now = old.by_name, new.by_name
    names = {
        "added": now.keys() - was.keys(),
        "removed": was.keys() - now.keys(),
        "changed": {name for name in now.keys() & was.keys() if now[name] != was[name]},
    }
    told = [f"{what} {', '.join(sorted(which))}" for what, which in names.items() if which]
    if old.without_key != new.without_key:
        told.append("other limits without a key")
    return "; ".join(told) or "the same keys"


def identity_of(path: Path) -> tuple[int, ...] | None:
    """What changes with a file; None: it is not there."""
    try:
        known = os.stat(path)
    except OSError:
        return None
    return known.st_mtime_ns, known.st_size, known.st_ino
