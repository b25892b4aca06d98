"""Where a result comes from: the head of every JSON file that a script writes."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PACKAGES = ("tokenyard", "numpy", "numba", "ray", "torch", "gymnasium", "mlflow")


def _result_file(texts: list[str]) -> Path:
    """Refuse a file that cannot be written, before the command does its work."""
    path = Path(texts[0])
    there = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if path.is_dir():
        sys.exit(f"{path} is a folder; name a file")
    if there != path and not there.is_dir():
        sys.exit(f"{path} cannot be written: {there} is no folder")
    if not os.access(there, os.W_OK):
        sys.exit(f"{path} cannot be written: no permission to write {there}")
    return path


ResultFile = Annotated[
    Path,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=_result_file,
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    ),
]
"""Type of `--json` in every script, and of `--out` where what it names takes long to make."""


def command_line(token: str | None = None) -> str:
    """The command that runs, as a shell takes it; an argument `token` is left out of it."""
    program, *arguments = sys.argv
    start = ["tokenyard"] if Path(program).name == "tokenyard" else ["python", program]
    if token:
        arguments = [
            f"{argument[: -len(token)]}TOKEN"
            if argument == token or argument.endswith(f"={token}")
            else argument
            for argument in arguments
        ]
    return shlex.join([*start, *arguments])


def git_sha() -> str:
    """Commit of the checkout this package lies in, `-dirty` where files differ from it.

    `unknown` where it is installed without its repository, or there is no git.
    """
    try:
        sha = _git("rev-parse", "HEAD")
        return f"{sha}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else sha
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def lineage() -> dict[str, str]:
    """Command and commit that made an artifact, as its lineage has them."""
    return {"command": command_line(), "git_sha": git_sha()}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that results depend on."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def write_result(
    path: Path | None,
    command: str,
    seed: int | None,
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> None:
    """Write one result file: command, versions, seed, git_sha, flat rows, and `more`.

    Its folder is created; NaN becomes null. None: nothing is written.
    """
    if path is None:
        return
    head = {"command": command, "versions": versions(), "seed": seed, "git_sha": git_sha()}
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {**head, "rows": list(rows), **more}
    path.write_text(json.dumps(_without_nan(result), indent=2) + "\n", encoding="utf-8")


def make_console(width: int) -> Console:
    """A console on stdout, so many columns wide where that is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def report(
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    json_path: Path | None,
    seed: int | None,
    width: int = 120,
    notes: Sequence[str] = (),
    **more: Any,
) -> None:
    """Print a table and notes on stdout, and write its rows to a file where one is named.

    `width` counts in columns, where stdout is no terminal; `more` is for the file.
    """
    console = make_console(width)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)
    more |= {"notes": list(notes)} if notes else {}
    write_result(json_path, command_line(), seed, rows, **more)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    # JSON has no NaN, and strict readers refuse it.
    return None if isinstance(value, float) and value != value else value


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
