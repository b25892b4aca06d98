"""Scripts called where the tests run: starting a Python that imports Ray takes ten seconds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tyro

ROOT = Path(__file__).parents[1]


def load_script(path: str) -> ModuleType:
    """Import a script that lies in no package, by its path in the repository."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(script: ModuleType, *arguments: object) -> None:
    """Do what the command line does."""
    script.main(tyro.cli(script.Args, args=[*map(str, arguments)]))


def refusal(script: ModuleType, *arguments: object) -> str:
    """Return the one sentence with which the script ends; such an end has exit code 1."""
    with pytest.raises(SystemExit) as ended:
        call(script, *arguments)
    sentence = ended.value.code
    assert isinstance(sentence, str)
    assert len(sentence.splitlines()) == 1
    return sentence
