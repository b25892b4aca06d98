"""The live arena, in short: real routers before emulated engines that keep prefixes."""

import json
import sys

import pytest
from scripts import ROOT

pytestmark = pytest.mark.integration


def test_routers_play_in_turns_before_engines_that_keep_prefixes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from engines import live_arena

    # Every router of others that is installed, but for those that start a Ray or take a minute.
    routers = ("gateway", "Envoy, picker", "Envoy", "vllm-router", "smg")
    there = [name for name in routers if live_arena.is_there(name)]
    if len(there) < 2:
        pytest.skip("no router of others: `make plugs rivals`")
    path = tmp_path / "rows.json"
    args = live_arena.Args(
        cells=("unequal_prefix",), routers=routers, repeats=2, duration_s=4.0, warm_up_s=1.0,
        learn_s=0.0, json=path,
    )  # fmt: skip
    live_arena.main(args)
    rows = {row["entry"]: row for row in json.loads(path.read_text()) if row["cell"] != "all"}
    assert sorted(rows) == sorted(there)
    for row in rows.values():
        assert (row["dropped_fraction"], row["stream_count"]) == (0.0, 2)
        assert 0.0 < row["mean_ttft_s"] < row["mean_response_s"] < 20.0
