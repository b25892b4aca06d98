"""Data that is read from files: the model of all of it, and files that ship with a package."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class FrozenModel(BaseModel):
    """A value: it never changes, and a field that is not known is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid")


M = TypeVar("M", bound=FrozenModel)


def shipped_names(package: str, folder: str) -> list[str]:
    """Names of the YAML files in a package's folder, sorted."""
    files = (resources.files(package) / folder).iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def read_named(name: str, kind: str, package: str, folder: str) -> str:
    """Return the text of a shipped file by name, or of any YAML file by path; `kind` is for errors.

    Raises:
        ValueError: Unknown name; the message has the closest one.
        OSError: There is no such file.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name).read_text(encoding="utf-8")
    names = shipped_names(package, folder)
    if name not in names:
        hint = did_you_mean(name, names)
        raise ValueError(f"unknown {kind} {name!r}; choose one of {names}{hint}")
    return (resources.files(package) / folder / f"{name}.yaml").read_text(encoding="utf-8")


def read_fields(name: str, kind: str, package: str, folder: str) -> dict[str, Any]:
    """Return the fields of a file that `read_named` finds.

    Raises:
        ValueError: Unknown name, no such file, or one that is no YAML mapping; in one sentence.
    """
    try:
        text = read_named(name, kind, package, folder)
    except OSError as error:
        raise ValueError(f"{kind} file {name}: {error.strerror}") from None
    try:
        fields = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # Numbers of 5,000 digits and impossible dates raise ValueError, and a tag whose value has
        # the wrong kind fails in a lookup.
        raise ValueError(f"{kind} file {name} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{kind} file {name} has no fields: it must be a mapping")
    return fields


def fitted(model: type[M], fields: Mapping[str, Any], what: str) -> M:
    """Return what the fields of a file say.

    Raises:
        ValueError: They do not fit the model; one sentence that begins with `what`.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ValueError(f"{what}: {sentence_of(error)}") from None


def sentence_of(error: ValidationError) -> str:
    """Say in one sentence what is wrong first, with its field where it is of one."""
    first, *others = error.errors()
    field = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(others)} more)" if others else ""
    return (f"{field}: " if field else "") + first["msg"].removeprefix("Value error, ") + more


def at_least_one(option: str, value: int) -> int:
    """Return a number that counts something.

    Raises:
        ValueError: It is below 1.
    """
    if value < 1:
        raise ValueError(f"{option} {value} must be at least 1")
    return value


def check_distinct(what: str, names: Sequence[str]) -> None:
    """Refuse a name that appears more than once.

    Raises:
        ValueError: One does; the text calls it `what`.
    """
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{what} {twice!r} appears more than once")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return an error's hint at the closest name; "" if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
