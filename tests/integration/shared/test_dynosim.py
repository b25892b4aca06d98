"""A simulator that NVIDIA wrote finds what ours does, on the same traces at the same speeds."""

import sys

import pytest
from scripts import ROOT, load_script

sys.path.append(str(ROOT / "benchmarks"))
DYNOSIM = load_script("benchmarks/dynosim.py")
PARITY = load_script("benchmarks/rival_parity.py")
CELL = DYNOSIM.Cell("most", 0.7, 4, "azure_conv")


@pytest.mark.integration
def test_dynosim_and_our_simulator_agree_on_a_cell():
    if absent := PARITY.missing("dynosim"):
        pytest.skip(absent)
    row = DYNOSIM.measure(CELL, DYNOSIM.Args(streams=1, requests=800))
    # Prompts are found in the same caches under round robin, to the token.
    assert row["round_robin_hit_fraction"] == pytest.approx(row["dynosim_round_robin_hit_fraction"])
    assert row["e2e_round_robin_s"] == pytest.approx(row["e2e_dynosim_round_robin_s"], rel=0.01)
    assert row["e2e_told_s"] == pytest.approx(row["e2e_dynosim_s"], rel=0.01)
    assert row["ttft_told_saving_agrees"]
    assert row["told_decisions_fraction"] > 0.9
