"""Names of sweeps: each has a folder of its own."""

import pytest

from tune_configs.sweep import open_chain


def test_the_name_of_another_problems_sweep_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (sweep,) = open_chain("routing:default", str(tmp_path), "mine").sweeps
    # What Tune leaves in the folder of a sweep that has begun.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/tuner.pkl").touch()
    assert sweep.path == str(tmp_path / "mine")
    for reference in ("allocation:default", "routing:default"):
        with pytest.raises(ValueError, match="sweep 'mine' exists already"):
            open_chain(reference, str(tmp_path), "mine")
    # A chain keeps its sweeps in folders below.
    folders = [one.path for one in open_chain("default:smoke", str(tmp_path), "mine").sweeps]
    assert folders == [str(tmp_path / "mine" / name) for name in ("routing", "allocation")]
