"""Callers: API keys by their hashes, and the key file, which is read again when it changes.

A key is drawn at random with 256 bits, so its SHA-256 tells nothing about it and needs no salt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from serve_app.watched_file import WatchedFile, read_message
from tokenyard.config import FrozenModel, check_distinct

TOKEN = "token"
"""Name of the key that is the one token of all callers."""
ADMIN_TOKEN = "admin-token"
"""Name of the key that is the token of changes."""
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]
_Limit = Annotated[int, Field(ge=1, le=10**12)] | None


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller, as far as known."""

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
    """Limits of a caller; None: no limit.

    Minutes are token buckets that hold one minute's worth. Days are those of UTC. Tokens are those
    of prompts and answers.
    """

    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    requests_per_day: _Limit = None
    tokens_per_day: _Limit = None


UNLIMITED = CallerLimits()


class ApiKey(FrozenModel):
    """A key, without the key itself."""

    name: _Name
    """Name in logs; no two keys have the same."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hash of the key, in hex."""
    tenant: _Name | None = None
    """Whose requests are counted together."""
    admin: bool = False
    """Whether it changes what is served."""
    autopilot: bool = False
    """Whether it changes policies, and nothing else, until a person vetoes that."""
    may_generate: bool | None = None
    """Whether it asks models; None: unless it is an admin's or an autopilot's."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Models that it may ask; None: all."""
    limits: CallerLimits = UNLIMITED

    @model_validator(mode="after")
    def _names_a_tenant(self) -> Self:
        if not (self.admin or self.autopilot) and self.tenant is None:
            raise ValueError("give the tenant of a key that is no admin's and no autopilot's")
        return self

    @classmethod
    def of_token(cls, name: str, token: str, admin: bool = False) -> ApiKey:
        """Make the key for a token of the environment: without tenant or limits."""
        return cls.model_construct(
            name=name, sha256=hash_of(token), tenant=None, admin=admin, autopilot=False,
            may_generate=True, models=None, limits=UNLIMITED,
        )  # fmt: skip

    @property
    def generates(self) -> bool:
        """Whether it may ask models."""
        if self.may_generate is not None:
            return self.may_generate
        return not (self.admin or self.autopilot)


class KeysMessage(FrozenModel):
    """The content of a key file."""

    keys: tuple[ApiKey, ...] = ()
    without_key: CallerLimits | None = None
    """Limits of each address without a key; None: it may do nothing."""

    @model_validator(mode="after")
    def _are_distinct(self) -> Self:
        check_distinct("name", [key.name for key in self.keys])
        check_distinct("sha256", [key.sha256 for key in self.keys])
        reserved = {TOKEN, ADMIN_TOKEN}.intersection(key.name for key in self.keys)
        if reserved:
            raise ValueError(f"name {min(reserved)!r} is the environment's")
        return self


def hash_of(key: str) -> str:
    """Return the SHA-256 of a key, as key files hold it."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Keys, looked up by what a caller sends."""

    def __init__(self, keys: Sequence[ApiKey], without_key: CallerLimits | None = None) -> None:
        """Hold keys, and the limits of an address without a key; None: it may do nothing."""
        self.by_name = {key.name: key for key in keys}
        self.without_key = without_key
        self.limits = {key.name: None if key.limits == UNLIMITED else key.limits for key in keys}
        self.tenants = frozenset(key.tenant for key in self.by_name.values() if key.tenant)
        self._by_hash = {key.sha256: key for key in self.by_name.values()}

    def find(self, given: str) -> ApiKey | None:
        """Return the key that a caller sends; None: it is unknown.

        How long this takes depends on the hash of what is given, from which nobody can steer
        towards a key that has another.
        """
        return self._by_hash.get(hash_of(given))


class KeyFile(WatchedFile[KeyRing]):
    """A key file, and its content when it was last valid."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "keys", KeyRing(()), read_keys, _difference)


def read_keys(path: Path) -> KeyRing:
    """Read a key file; a ValueError names it and says why it cannot be used."""
    message = read_message(path, KeysMessage, "keys")
    return KeyRing(message.keys, message.without_key)


def _difference(old: KeyRing, new: KeyRing) -> str:
    """Say which keys have changed."""
    was, now = old.by_name, new.by_name
    names = {
        "added": now.keys() - was.keys(),
        "removed": was.keys() - now.keys(),
        "changed": {name for name in now.keys() & was.keys() if now[name] != was[name]},
    }
    changes = [f"{what} {', '.join(sorted(which))}" for what, which in names.items() if which]
    if old.without_key != new.without_key:
        changes.append("other limits without a key")
    return "; ".join(changes) or "the same keys"
