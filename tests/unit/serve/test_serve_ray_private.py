"""Private parts of Ray are used from one file, with the version that they were checked with."""

from importlib.metadata import version
from pathlib import Path

import pytest

import serve_app
from serve_app import ray_private

PRIVATE = ("ray.serve._private", "internal_kv", "serve._run")


def test_another_version_of_ray_is_refused_in_a_sentence():
    ray_private.check_version(version("ray"))
    with pytest.raises(ImportError, match=r"checked with 2\.60\.0, and this is Ray 3\.0\.0"):
        ray_private.check_version("3.0.0")


def test_no_other_file_imports_them():
    files = Path(serve_app.__file__).parent.rglob("*.py")
    using = {one.name for one in files if any(name in one.read_text() for name in PRIVATE)}
    assert using == {"ray_private.py"}
