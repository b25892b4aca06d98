"""All commands under one name: `tokenyard sweep` does what `python pipelines/sweep.py` does."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

import tyro

FOLDER = Path(__file__).parent
NAMES = {"deploy": "serve"}
"""Scripts whose verb has another name."""
DISTRIBUTIONS = {"ot": "pot", "pynvml": "nvidia_ml_py", "zmq": "pyzmq"}
"""Packages whose modules have another name."""


def verbs() -> dict[str, str]:
    """Every verb with the name of its module, sorted."""
    modules = (path.stem for path in FOLDER.glob("*.py"))
    commands = [name for name in modules if name not in ("__init__", "cli")]
    return dict(sorted((NAMES.get(name, name), name) for name in commands))


def summary(module: str) -> str:
    """First line of a module's docstring, read without importing it."""
    text = (FOLDER / f"{module}.py").read_text(encoding="utf-8")
    return str(ast.get_docstring(ast.parse(text))).partition("\n")[0]


def overview() -> str:
    """Return the text of `tokenyard --help`."""
    modules = verbs()
    width = max(map(len, modules))
    lines = [f"  {verb:{width}}  {summary(module)}" for verb, module in modules.items()]
    return "\n".join(
        ["usage: tokenyard VERB [OPTIONS]", "", *lines, "", "tokenyard VERB --help says more."]
    )


def extras_with(module: str) -> list[str]:
    """The extras of the installed package that bring a module, sorted."""
    top = module.partition(".")[0]
    distribution = DISTRIBUTIONS.get(top, top)
    return sorted(
        extra
        for requirement in importlib.metadata.requires("tokenyard") or ()
        if re.split(r"[^\w-]", requirement)[0].replace("-", "_") == distribution
        for extra in re.findall(r"extra == .(\w+)", requirement)
        if extra not in ("dev", "test")
    )


def main() -> None:
    """Run the command that the first argument names."""
    verb, *arguments = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help"):
        print(overview())
        return
    modules = verbs()
    if verb not in modules:
        close = difflib.get_close_matches(verb, modules, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(modules)}"
        sys.exit(f"tokenyard: unknown verb {verb!r}; {hint}")
    try:
        command = importlib.import_module(f"pipelines.{modules[verb]}")
        prog, description = f"tokenyard {verb}", command.__doc__
        command.main(tyro.cli(command.Args, prog=prog, args=arguments, description=description))
    except ModuleNotFoundError as error:
        extras = extras_with(error.name or "")
        if not extras:
            raise
        choice = " or ".join(f"'tokenyard[{extra}]'" for extra in extras)
        sys.exit(f"tokenyard {verb} needs {error.name}: pip install {choice}")


if __name__ == "__main__":
    main()
