"""Puts the folders beside `tokenyard` inside it when a wheel is built.

A checkout imports `envs`, `pipelines`, `serve_app` and `tune_configs` by these names. In a wheel
they would hide a user's own folders of the same names, and PyPI has another `envs`: there they are
`tokenyard.envs` and so on, and what imports them is rewritten to say so.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("envs", "pipelines", "serve_app", "tune_configs")
_NAME = rf"({'|'.join(FOLDERS)})"
_REWRITES = (
    (re.compile(rf"^(\s*)import {_NAME}$", re.MULTILINE), r"\1from tokenyard import \2"),
    (re.compile(rf"^(\s*(?:from|import)) {_NAME}(?=[\s.])", re.MULTILINE), r"\1 tokenyard.\2"),
    # A module named by a string: of an entry point, a subprocess, a data file.
    (re.compile(rf"(\"){_NAME}(?=\"|\.[\w{{])"), r"\1tokenyard.\2"),
)


def inside(text: str, path: str) -> str:
    """Return a module's text with the imports that it has inside `tokenyard`.

    Raises:
        ValueError: It imports a folder in a form that would bind another name there.
    """
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if left := re.search(rf"^\s*import tokenyard\.{_NAME}[\w.]*\s*$", text, re.MULTILINE):
        raise ValueError(f"{path}: write `from ... import`, not {left[0].strip()!r}")
    return text


class BuildInside(build_py):
    """`build_py` of a wheel: copies modules, with their imports rewritten."""

    def build_module(self, module, module_file, package):  # noqa: D102
        built, copied = super().build_module(module, module_file, package)
        path = Path(built)
        path.write_text(inside(path.read_text(encoding="utf-8"), built), encoding="utf-8")
        return built, copied


if "editable_wheel" in sys.argv:
    setup(packages=find_packages(include=[f"{name}*" for name in ("tokenyard", *FOLDERS)]))
else:
    beside = find_packages(include=[f"{name}*" for name in FOLDERS])
    setup(
        packages=[
            *find_packages(include=["tokenyard*"]),
            *(f"tokenyard.{name}" for name in beside),
        ],
        package_dir={f"tokenyard.{name}": name for name in FOLDERS},
        cmdclass={"build_py": BuildInside},
    )
