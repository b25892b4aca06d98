"""What DynoSim is given is what our simulator is given; no DynoSim is needed for that."""

import json
import sys

import numpy as np
import pytest
from scripts import ROOT, load_script, refusal

from tokenyard.workload.trace import Trace

sys.path.append(str(ROOT / "benchmarks"))
TRACES = load_script("benchmarks/dynosim_traces.py")
DYNOSIM = load_script("benchmarks/dynosim.py")
CELL = TRACES.Cell("most", 0.7, 2, "azure_code")


def trace(chains, context, size=16):
    num = len(context)
    return Trace(
        np.arange(num) / 8.0,
        np.array(context),
        np.full(num, 5),
        prefix_hashes=chains,
        prefix_block_tokens=size,
    )


def test_a_trace_becomes_lines_whose_equal_blocks_are_equal_prefixes():
    chains = ((7, -3), (7, -3, 9), (7,), ())
    lines = [json.loads(line) for line in TRACES.mooncake_lines(trace(chains, (32, 50, 20, 40)))]
    assert [line["timestamp"] for line in lines] == [0.0, 125.0, 250.0, 375.0]
    assert [line["input_length"] for line in lines] == [32, 50, 20, 40]
    assert [line["output_length"] for line in lines] == [5] * 4
    blocks = [line["hash_ids"] for line in lines]
    # The blocks that are not whole, and those that are not told, are nobody else's.
    assert [len(one) for one in blocks] == [2, 4, 2, 3]
    assert blocks[0] == blocks[1][:2]
    assert blocks[2][0] == blocks[0][0]
    own = [blocks[1][3], blocks[2][1], *blocks[3]]
    assert len(set(own)) == len(own)
    assert not set(own) & {*blocks[0], blocks[1][2]}
    assert min(min(one) for one in blocks) >= 0


def test_a_trace_of_a_cell_tells_whole_blocks_of_prompts_only():
    scenario = TRACES.scenario_of(CELL)
    drawn = TRACES.trace_of(scenario, 200, np.random.default_rng(0))
    lengths = [len(chain) for chain in drawn.prefix_hashes]
    assert lengths == (drawn.context_tokens // 16).tolist()
    again = TRACES.trace_of(scenario, 200, np.random.default_rng(0))
    assert list(TRACES.mooncake_lines(drawn)) == list(TRACES.mooncake_lines(again))


def test_tables_give_the_four_coefficients_back():
    a, b, c, d = iteration = np.array([6e-3, 2e-5, 1e-5, 4e-8])
    tables = TRACES.timing_tables(iteration)
    prefill = np.interp(700, tables["prefill_isl"], tables["prefill_ttft_ms"])
    assert prefill == pytest.approx(1e3 * 700 * b)
    sequences, kv = 40, 61_000
    read, context = tables["decode_active_kv_tokens"], tables["decode_context_length"]
    by_context = [np.interp(kv, read, column) for column in tables["decode_itl"].T]
    decode = np.interp(kv / sequences, context, by_context)
    assert decode == pytest.approx(1e3 * (a + c * sequences + d * kv), rel=1e-4)


def test_an_engine_has_the_limits_of_the_replicas(tmp_path):
    scenario = TRACES.scenario_of(CELL)
    engine = TRACES.engine_of(scenario, tmp_path)
    replica = scenario.fleet.replicas[0]
    assert engine["num_gpu_blocks"] * 16 == pytest.approx(replica.kv_capacity_tokens, abs=16)
    assert engine["max_num_seqs"] == replica.max_batch
    assert set(np.load(engine["timing_model"]["config"]["path"])) == set(
        TRACES.timing_tables(replica.iteration)
    )


def test_cells_are_drawn_once_each_and_the_same_for_a_seed():
    cells = TRACES.drawn_cells(10, 20)
    assert len(set(cells)) == 10
    assert cells == TRACES.drawn_cells(10, 20)
    assert cells != TRACES.drawn_cells(10, 21)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (-0.10, -0.12, True),
        (-0.10, -0.13, False),
        (0.10, -0.10, False),
        (0.004, -0.004, True),
        (0.004, -0.02, False),
    ],
)
def test_changes_agree_by_sign_and_size_or_where_there_are_none(ours, theirs, same):
    assert DYNOSIM.agree(ours, theirs, 0.01) == same
    assert DYNOSIM.agree(theirs, ours, 0.01) == same


def test_without_dynosim_it_is_refused_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENYARD_RIVALS", str(tmp_path))
    sentence = refusal(DYNOSIM)
    assert "no dynosim in" in sentence
    assert "make rivals" in sentence
