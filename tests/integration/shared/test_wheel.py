"""A wheel as a user installs it: one package, and little of it needs more than the base."""

import ast
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("envs", "pipelines", "serve_app", "tune_configs")
DATA = (".yaml", ".json", ".npz", ".html", ".css", ".js", ".csv", ".typed")
LARGEST_BYTES = 400e6
USER = """
import sys
import tokenyard
assert "numpy" not in sys.modules, "`import tokenyard` imports all"
import envs
assert envs.mine, "the user's own folder is hidden"
from tokenyard import envs
import gymnasium
envs.register()
env = gymnasium.make("tokenyard/LoadBalancing-v0", scenario="poisson_085")
env.reset(seed=0)
print(env.step(2)[1])
env = gymnasium.make("tokenyard/Parallelism-v0", scenario="a100x8_13b", action="grid")
env.reset(seed=0)
env.step(1)
try:
    gymnasium.make("tokenyard/Regions-v0", scenario="continents")
except ModuleNotFoundError as error:
    assert "pip install 'tokenyard[train]'" in str(error)
assert not {"ray", "torch", "mlflow", "scipy", "pandas"} & set(sys.modules)
"""

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the sdist of what is tracked here."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in listed.split("\0"):
        if name and name.split("/")[0] not in ("tests", "docs", "benchmarks"):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes((ROOT / name).read_bytes())
    sdist = f"import setuptools.build_meta as backend; backend.build_sdist({str(built)!r})"
    subprocess.run([sys.executable, "-c", sdist], cwd=source, check=True, capture_output=True)
    (archive,) = built.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(built), str(archive)], check=True)
    (path,) = built.glob("*.whl")
    return path


def names_beside(tree):
    """What a module imports, or names in a string, of the folders that a wheel has not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if " " not in node.value and "/" not in node.value else []
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in FOLDERS)


def test_all_of_it_is_one_package_that_imports_nothing_beside_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        texts = {name: archive.read(name).decode() for name in names if name.endswith(".py")}
        (top,) = (name for name in archive.namelist() if name.endswith("top_level.txt"))
        assert archive.read(top).split() == [b"tokenyard"]
    assert {name.partition("/")[0] for name in names} == {"tokenyard"}
    beside = {name: list(names_beside(ast.parse(text))) for name, text in texts.items()}
    assert (
        {name: found for name, found in beside.items() if found}
        == {
            # The alias of a checkout, and modules' names for users to type.
        }
    )


def test_what_a_checkout_has_beside_its_modules_is_in_it(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "tokenyard", *FOLDERS],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    expected = {
        name if name.startswith("tokenyard/") else f"tokenyard/{name}"
        for name in tracked
        if name.endswith((".py", *DATA)) and (ROOT / name).exists()
    }
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The programs' folder of an environment with the base alone."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet"]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("no package index answers")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_the_base_is_small(installed):
    files = (path for path in installed.parent.rglob("*") if not path.is_symlink())
    assert sum(path.stat().st_size for path in files) < LARGEST_BYTES


def run(installed, tmp_path, *command):
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    variables["TOKENYARD_CACHE"] = str(installed.parent / "kernels")
    return subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=tmp_path, capture_output=True, text=True, env=variables,
    )  # fmt: skip


def test_it_decides_simulates_and_evaluates_beside_a_users_own_folders(installed, tmp_path):
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("mine = True\n")
    (tmp_path / "user.py").write_text(USER)
    done = run(installed, tmp_path, "python", "user.py")
    assert done.returncode == 0, done.stderr
    done = run(
        installed, tmp_path, "tokenyard", "evaluate", "--scenario", "poisson_085",
        "--policies", "sed,round_robin", "--streams", "5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round_robin" in done.stdout


@pytest.mark.parametrize(
    ("verb", "extra"),
    [("sweep", "tokenyard[train]"), ("serve", "tokenyard[serve]"), ("train", "tokenyard[train]")],
)
def test_a_verb_without_its_extra_names_it(installed, tmp_path, verb, extra):
    done = run(installed, tmp_path, "tokenyard", verb, "--help")
    assert done.returncode == 1
    assert f"tokenyard {verb} needs " in done.stderr
    assert f"pip install '{extra}'" in done.stderr or f"or '{extra}'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
