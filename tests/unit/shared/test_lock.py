"""The lock has one version of everything that pyproject.toml asks for."""

import importlib.util
from importlib.machinery import SourceFileLoader

import pytest
from scripts import ROOT

from serve_app.ray_private import CHECKED_WITH

PINNED_RAY = (f"ray[rllib,tune]=={CHECKED_WITH}", f"ray[serve]=={CHECKED_WITH}")


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """The script, on a copy of the lock that may be written to."""
    loader = SourceFileLoader("lock", str(ROOT / ".ci/lock"))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lock", loader))
    loader.exec_module(module)
    copies = {version: tmp_path / path.name for version, path in module.LOCKS.items()}
    for version, copy in copies.items():
        copy.write_text(module.LOCKS[version].read_text())
    monkeypatch.setattr(module, "LOCKS", copies)
    return module


def replace(lock, old, new):
    path = lock.LOCKS[lock.FIRST]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def faults(lock):
    return lock.faults(lock.LOCKS[lock.FIRST])


def test_each_lock_satisfies_the_project_with_the_same_versions(lock):
    assert [lock.faults(path) for path in lock.LOCKS.values()] == [[], [], []]
    first, *others = map(lock.locked, lock.LOCKS.values())
    assert first["ray"] == (CHECKED_WITH, True)
    assert {"fastapi", "starlette", "uvicorn", "httptools", "uvloop"} < set(first)
    assert all(one == first for one in others)


def test_a_version_that_the_project_refuses_is_named(lock):
    replace(lock, f"ray=={CHECKED_WITH} ", "ray==2.59.0 ")
    assert faults(lock) == [
        f"pyproject.toml asks for {pinned}, and the lock has 2.59.0" for pinned in PINNED_RAY
    ]


def test_a_package_that_is_not_in_the_lock_is_named(lock):
    replace(lock, "\nschemathesis==", "\nanother==")
    [fault] = faults(lock)
    assert "schemathesis, which is not in the lock" in fault


def test_every_package_but_torch_has_a_hash(lock):
    replace(lock, "\nuvicorn==", "\nuvicorn==0.0\nother==")
    assert "uvicorn must have a hash" in faults(lock)
