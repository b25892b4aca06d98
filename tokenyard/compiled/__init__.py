"""How this project compiles: two decorators, and one folder for what they compile.

A cached function of numba's does not notice a change in another file that it calls. So the folder
is named by the sources of everything that is compiled: whatever runs the code, after any change,
finds what was compiled from these sources or nothing. `python -m tokenyard.compiled` fills it.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event as numba_events

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., object])

PACKAGE = Path(__file__).resolve().parents[1]
_KEPT_FOLDERS = 4
"""Folders of other sources that are kept, those used last."""
_IMPORTED = re.compile(rb"^from (tokenyard[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_CONSTANT = re.compile(rb"\b[A-Z][A-Z0-9_]+\b")


def _njit(function: Function, **options: Any) -> Function:
    result: Function = numba.njit(cache=True, error_model="numpy", **options)(function)
    return result


def compiled(function: Function) -> Function:
    """Compile a function that allocates nothing; the plain form stays reachable as `py_func`.

    Without reference counting (`_nrt`) slicing an array costs nothing, which makes the
    simulator's step twice as fast; in return a compiled function must not create arrays: it
    works in those it is given. Division follows IEEE, as in numpy, without checks.
    """
    return _njit(function, _nrt=False)


def compiled_inline(function: Function) -> Function:
    """Compile a function that allocates nothing into every caller: where passing arrays costs."""
    return _njit(function, _nrt=False, forceinline=True)


def compiled_with_arrays(function: Function) -> Function:
    """Compile a function that may create arrays; slicing costs it a count of references."""
    return _njit(function)


def source_key(package: Path = PACKAGE) -> str:
    """Name the sources of all modules with compiled functions, and of constants they import."""
    texts = {}
    for folder, _, names in os.walk(package):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    texts[os.path.relpath(path, package)] = file.read()
    used = {path for path, text in texts.items() if b"\n@compiled" in text or b"njit(" in text}
    for path in list(used):
        used.update(_constants_from(texts[path]) & texts.keys())
    key = hashlib.sha256()
    for path in sorted(used):
        key.update(path.encode() + b"\0" + texts[path])
    return key.hexdigest()[:12]


def _constants_from(text: bytes) -> set[str]:
    """Files that may define constants which a module uses: these are compiled in."""
    paths = []
    for module, names in _IMPORTED.findall(text):
        at = os.path.join(*module.decode().split(".")[1:], "")
        if _CONSTANT.search(names):
            paths += [at.rstrip(os.sep), at + "__init__"]
        paths += [at + name.decode() for name in re.findall(rb"\b[a-z]\w*", names)]
    return {path + ".py" for path in paths}


def _roots(given: str) -> Iterator[Path]:
    """Folders that may hold the cache, the best first."""
    if given:
        yield Path(given)
    if (PACKAGE.parent / "pyproject.toml").is_file():
        yield PACKAGE.parent / ".cache"
    yield Path(os.environ.get("TOKENYARD_CACHE") or os.path.expanduser("~/.cache/tokenyard"))
    yield Path(tempfile.gettempdir()) / f"tokenyard-{os.getuid()}"


def cache_folder(given: str, key: str) -> Path:
    """Make the folder for what is compiled from some sources; remove those long not used.

    It is in the folder that the user names, in `.cache` of a clone, or in the user's cache.

    Args:
        given: Value of NUMBA_CACHE_DIR; empty: none.
        key: Of the sources, `source_key`.

    Raises:
        OSError: No folder can be written to.
    """
    for root in _roots(given):
        folder = root / f"numba-{key}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            os.utime(folder)
        except OSError:
            continue
        others = [path for path in root.glob("numba-" + "?" * len(key)) if path != folder]
        for path in sorted(others, key=_used_at, reverse=True)[_KEPT_FOLDERS:]:
            shutil.rmtree(path, ignore_errors=True)
        return folder
    raise OSError("no folder for compiled functions can be written to; set NUMBA_CACHE_DIR to one")


def _used_at(folder: Path) -> float:
    # Another process may be removing it too.
    return folder.stat().st_mtime if folder.exists() else 0.0


# numba would load scipy's linear algebra, 15 MB, for `np.cov`, which nothing here compiles.
if "scipy.linalg" not in sys.modules:
    sys.modules["scipy.linalg"] = None  # type: ignore[assignment]
    importlib.import_module("numba.np.arraymath")
    del sys.modules["scipy.linalg"]
_config: Any = numba.config
_config.CACHE_DIR = str(cache_folder(_config.CACHE_DIR, source_key()))


class _Notice(numba_events.Listener):
    """Says once that something is being compiled, which may take minutes and looks like a hang."""

    said = False

    def on_start(self, event: object) -> None:
        if not self.said:
            self.said = True
            logger.warning("compiling kernels, once for this version; this may take minutes")

    def on_end(self, event: object) -> None:
        pass


numba_events.register("numba:compile", _Notice())
