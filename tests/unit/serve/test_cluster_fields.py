"""The page of all fields of a cluster file is what its models say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_reference_of_cluster_files_is_what_the_models_say(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [".ci/cluster_fields"])
    assert runpy.run_path(str(ROOT / ".ci" / "cluster_fields"))["main"]() == 0, capsys.readouterr()
