"""Where compiled functions are kept, and by what that place is named."""

import os
import shutil
import subprocess
import sys

import pytest

from tokenyard.compiled import PACKAGE, cache_folder, source_key


@pytest.fixture
def package(tmp_path):
    """A copy of the package's sources."""
    copy = tmp_path / "tokenyard"
    shutil.copytree(PACKAGE, copy, ignore=lambda _, names: [n for n in names if n == "__pycache__"])
    return copy


@pytest.mark.parametrize(
    "module", ["routing/observation.py", "routing/scores/order.py", "allocation/plans.py"]
)
def test_the_key_changes_with_what_a_kernel_calls_and_with_constants_it_uses(package, module):
    before = source_key(package)
    assert before == source_key()
    with (package / module).open("a") as file:
        file.write("\nANOTHER = 1\n")
    assert source_key(package) != before


def test_the_key_stays_when_a_module_changes_that_is_not_compiled(package):
    before = source_key(package)
    with (package / "provenance.py").open("a") as file:
        file.write("\nANOTHER = 1\n")
    assert source_key(package) == before


def test_a_folder_that_the_user_names_gets_a_keyed_one_inside(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    code = "import numba, tokenyard.compiled; print(numba.config.CACHE_DIR)"
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed.strip() == str(tmp_path / f"numba-{source_key()}")


def test_it_is_said_once_that_something_is_compiled_and_not_where_it_was_before(tmp_path):
    (tmp_path / "kernels.py").write_text(
        "from tokenyard.compiled import compiled\n\n\n"
        "@compiled\ndef twice(x):\n    return 2 * x\n\n\n"
        "@compiled\ndef thrice(x):\n    return 3 * x\n\n\n"
        "twice(1)\nthrice(1)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, tmp_path / "kernels.py"]
    said = [
        subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=True)
        for _ in range(2)
    ]
    assert said[0].stderr.count("compiling kernels") == 1
    assert said[1].stderr == ""


def test_a_place_that_cannot_be_written_to_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenyard.compiled.PACKAGE", tmp_path / "site-packages" / "tokenyard")
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path / "user"))
    blocked = tmp_path / "a_file"
    blocked.touch()
    assert cache_folder(str(blocked), "0" * 12) == tmp_path / "user" / f"numba-{'0' * 12}"


def test_only_the_folders_used_last_are_kept(tmp_path):
    for day in range(7):
        folder = tmp_path / f"numba-{day:012d}"
        folder.mkdir()
        os.utime(folder, (day, day))
    (tmp_path / "models").mkdir()
    used = cache_folder(str(tmp_path), "0" * 12)
    kept = {folder.name for folder in tmp_path.iterdir()}
    assert kept == {"models", used.name, *(f"numba-{day:012d}" for day in (3, 4, 5, 6))}
