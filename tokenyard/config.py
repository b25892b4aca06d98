"""Data that is read from files: the model of all of it, and files that ship with a package."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A value: it never changes, and a field that is not known is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def shipped_names(package: str, folder: str) -> list[str]:
    """Names of the YAML files in a package's folder, sorted."""
    files = (resources.files(package) / folder).iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def read_named(name: str, kind: str, package: str, folder: str) -> str:
    """Return the text of a shipped file by name, or of any YAML file by path.

    Args:
        name: A shipped name, or a path that ends in .yaml or .yml.
        kind: What it is, in words for the error.
        package: Whose files ship.
        folder: Of the package.

    Raises:
        ValueError: Unknown name, with the closest one.
        OSError: There is no such file.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name).read_text(encoding="utf-8")
    known = shipped_names(package, folder)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {kind} {name!r}; choose one of {known}{hint}")
    return (resources.files(package) / folder / f"{name}.yaml").read_text(encoding="utf-8")
