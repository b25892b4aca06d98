"""What every command in pipelines keeps to, and `tokenyard VERB`."""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from dataclasses import fields
from importlib.metadata import packages_distributions
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest
import tyro
from scripts import load_script, refusal

from pipelines import cli
from tokenyard.provenance import ResultFile, command_line
from tokenyard.workload.trace_options import TraceOptions

ROOT = Path(__file__).parents[3]
MODULES = sorted(cli.verbs().values())
COMMON = {
    "baseline", "compare", "duration_s", "entry", "fleet", "full", "json", "live", "load",
    "minutes", "name", "num_samples", "out", "policies", "quick", "rate_scale", "resume",
    "scenario", "seed", "source", "storage", "streams", "suite", "token", "trace", "url",
    *(one.name for one in fields(TraceOptions)),
}  # fmt: skip
"""Options that mean the same in every command, which docs/metrics.md and the README name."""
MOST_OWN_OPTIONS = 8
HIDDEN = get_args(tyro.conf.Suppress[int])[1]


def commands(module: str) -> list[type]:
    """The dataclasses of a command's options: one, or one for each subcommand."""
    args = importlib.import_module(f"pipelines.{module}").Args
    if not isinstance(args, UnionType) and get_origin(args) is None:
        return [args]
    return [get_args(one)[0] for one in get_args(args)]


def options(command: type) -> set[str]:
    """Names of the fields that can be given on the command line."""
    hints = get_type_hints(command, include_extras=True)
    return {one.name for one in fields(command) if HIDDEN not in get_args(hints[one.name])}


@pytest.mark.parametrize("module", MODULES)
def test_a_command_has_a_main_few_options_of_its_own_and_writes_its_rows(module):
    assert callable(importlib.import_module(f"pipelines.{module}").main)
    for command in commands(module):
        assert "json" in options(command)
        assert get_type_hints(command, include_extras=True)["json"] == ResultFile | None
        assert len(options(command) - COMMON) <= MOST_OWN_OPTIONS, command


def test_a_file_for_rows_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    def said(path):
        evaluate = load_script("pipelines/evaluate.py")
        return refusal(evaluate, "--scenario", "poisson_085", "--json", path)

    (tmp_path / "rows").write_text("")
    assert said(tmp_path) == f"{tmp_path} is a folder; name a file"
    assert said(tmp_path / "rows" / "x.json").endswith(f"{tmp_path / 'rows'} is no folder")
    (tmp_path / "locked").mkdir(mode=0o500)
    if not os.access(tmp_path / "locked", os.W_OK):  # root may write it
        assert "no permission" in said(tmp_path / "locked" / "new" / "x.json")
    assert tyro.cli(ResultFile, args=[str(tmp_path / "new" / "x.json")]) == (
        tmp_path / "new" / "x.json"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("module", ["fit_workload", "train"])
def test_so_is_a_file_for_what_took_long_to_make(module):
    (command,) = commands(module)
    assert get_type_hints(command, include_extras=True)["out"] == ResultFile | None


def test_a_hidden_option_is_not_counted():
    (replay,) = commands("replay")
    assert "pause_s" in {one.name for one in fields(replay)} - options(replay)


def test_no_command_hides_a_module_of_somebody_else():
    """The folder is first on the path of what runs there by its path."""
    others = set(packages_distributions()) - {"pipelines"}
    assert not {path.stem for path in (ROOT / "pipelines").glob("*.py")} & (
        sys.stdlib_module_names | others
    )


def test_help_lists_every_verb_with_a_line_and_imports_none(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tokenyard", "--help"])
    monkeypatch.setattr(importlib, "import_module", None)
    cli.main()
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:-2])
    assert {"serve", "sweep", "evaluate", "train", "paper"} <= set(listed) == set(cli.verbs())
    assert len(listed) == len(MODULES)
    assert all(line.endswith((".", "`.")) for line in listed.values())


@pytest.mark.parametrize("module", MODULES)
def test_help_has_every_command_on_a_line_of_its_own(module, capsys):
    script = importlib.import_module(f"pipelines.{module}")
    with pytest.raises(SystemExit):
        tyro.cli(script.Args, args=["--help"], description=script.__doc__)
    told = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = [line for line in script.__doc__.splitlines() if line.strip().startswith("python ")]
    assert set(shown) <= set(told)
    assert not any("noqa" in line for line in told)


def test_an_unknown_verb_is_refused_with_the_closest_one(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tokenyard", "evalute"])
    with pytest.raises(SystemExit, match=r"unknown verb 'evalute'; did you mean 'evaluate'\?"):
        cli.main()


def test_a_verb_calls_the_main_of_its_script(monkeypatch):
    fetch_traces = importlib.import_module("pipelines.fetch_traces")
    seen = []
    monkeypatch.setattr(fetch_traces, "main", seen.append)
    monkeypatch.setattr(sys, "argv", ["tokenyard", "fetch_traces", "azure_code", "--folder", "x"])
    cli.main()
    assert seen == [fetch_traces.Args(("azure_code",), Path("x"))]
    assert command_line() == "tokenyard fetch_traces azure_code --folder x"


def test_the_console_script_is_the_command_that_is_tested_here(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"tokenyard": "tokenyard.__main__:main"}
    begun = []
    monkeypatch.setattr(cli, "main", lambda: begun.append(1))
    importlib.import_module("tokenyard.__main__").main()
    assert begun == [1]


def test_a_package_that_is_not_there_is_found_in_the_extras(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # As an installed package lists them.
    lines = [
        f'{requirement}; extra == "{extra}"'
        for extra, requirements in project["optional-dependencies"].items()
        for requirement in requirements
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: project["dependencies"] + lines)
    assert cli.extras_with("torch.nn") == ["engines", "train"]
    assert cli.extras_with("ot") == ["train"]
    assert cli.extras_with("numpy") == cli.extras_with("nowhere") == []


def test_a_command_line_keeps_the_token_to_itself(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pipelines/replay.py", "--token", "abc", "--trace", "a b"])
    assert command_line("abc") == "python pipelines/replay.py --token TOKEN --trace 'a b'"
    monkeypatch.setattr(sys, "argv", ["pipelines/deploy.py", "--token=abc"])
    assert command_line("abc") == "python pipelines/deploy.py --token=TOKEN"
