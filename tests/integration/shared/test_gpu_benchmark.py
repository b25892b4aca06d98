"""benchmarks/gpu on a CPU, with models of no size: all parts run, and their files calibrate."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest
from scripts import ROOT

from pipelines import calibrate
from tokenyard.perf.models import load_llm
from tokenyard.routing.artifact import DEFAULT_RULE

pytest.importorskip("transformers")
pytestmark = pytest.mark.integration


def call(folder, *parts):
    command = [sys.executable, "-m", "benchmarks.gpu", *parts, "--out", folder, "--device", "cpu"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([*command, "--tiny"], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    # A part that was ended while it wrote a row.
    (folder / "grid_tiny.csv").write_text(
        "prefill_tokens,decoding_sequences,kv_tokens,time_s,min_s,max_s,kind,model,repeats,dtype,"
        "device\n8,0,0,0.5,0.5,0.5,prefill,tiny,5,float32,cpu\n32,0,0,0.00"
    )
    call(folder, "equality", "grid", "fleet", "summary")
    return folder


def rows_of(folder, table):
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    return [row for row in rows if row["table"] == table]


def test_the_rank_equals_plain_transformers_and_keeps_its_limits(folder):
    rows = {(row["check"], row["dtype"]): row for row in rows_of(folder, "equality")}
    assert len(rows) == 15
    assert all(row["passed"] in (None, "True", True) for row in rows.values())
    assert rows["largest difference of logits", "float32"]["value"] <= 1e-3
    assert rows["share of generated tokens equal", "bfloat16"]["value"] > 0.5


def test_iterations_calibrate_the_model(folder, tmp_path):
    names = {row["name"] for row in rows_of(folder, "iterations")}
    assert names == {
        "grid_tiny", "grid_tiny_deep", "fleet_iterations_wide", "fleet_iterations_deep",
    }  # fmt: skip
    for name in names:
        out = tmp_path / f"{name}.json"
        calibrate.main(calibrate.Args(iterations=folder / f"calibrate_{name}.csv", json=out))
        (row,) = json.loads(out.read_text())["rows"]
        assert row["measurements"] >= 11
        assert row["iteration_s"] > 0
        assert row["held_out_error_fraction"] > 0


def test_a_part_takes_up_where_it_was_ended(folder):
    table = pd.read_csv(folder / "grid_tiny.csv")
    assert len(table) == 11
    assert table["time_s"].iloc[0] == 0.5
    before = (folder / "grid_tiny.csv").read_bytes()
    assert "grid tiny: 11 of 11 cells" in call(folder, "grid")
    assert (folder / "grid_tiny.csv").read_bytes() == before


def test_every_policy_answers_the_same_requests_beside_a_forecast(folder):
    requests = pd.read_csv(folder / "fleet_requests.csv")
    sent = [
        part[["request", "context_tokens", "generated_tokens"]].to_numpy().tolist()
        for _, part in requests.groupby("policy")
    ]
    assert len(sent) == 3
    assert sent[0] == sent[1] == sent[2]
    assert (requests["ttft_s"] > 0).all()
    assert (requests["response_s"] >= requests["ttft_s"]).all()
    assert set(requests["engine"]) == {"wide", "deep"}
    rows = rows_of(folder, "policies")
    assert [row["policy"] for row in rows] == ["round_robin", "sed", DEFAULT_RULE]
    assert all(row["forecast_mean_response_s"] > 0 for row in rows)


def test_on_a_card_that_the_model_knows_its_error_is_told_before_and_after(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.gpu import summary

    table = pd.read_csv(folder / "grid_tiny.csv").assign(device="NVIDIA H100 80GB HBM3")
    table.to_csv(folder / "grid_pretended.csv", index=False)
    row = summary._errors(folder, "grid_pretended", "tiny", "NVIDIA H100 80GB HBM3")
    assert row["before_error_fraction"] > 0
    assert row["after_error_fraction"] > 0


def test_the_large_model_is_the_one_of_the_performance_model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.gpu.shapes import SHAPES

    known = load_llm("llama3_8b").model_dump()
    assert SHAPES["llama3_8b"]._asdict().items() <= known.items()


def test_a_decoded_token_is_what_the_whole_prompt_gives(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    torch = pytest.importorskip("torch")
    from benchmarks.gpu.llama import Batch, Llama
    from benchmarks.gpu.shapes import SHAPES

    torch.manual_seed(0)
    model = Llama(SHAPES["tiny_deep"], 64, 64, {"device": "cpu", "dtype": torch.float32})
    with torch.inference_mode():
        for _ in range(5):
            tokens, places = torch.randint(128, (20,)), torch.arange(20)
            whole = model(tokens, places, Batch(20, 0, 0))
            model(tokens[:19], places[:19], Batch(19, 0, 0))
            assert model(tokens[19:], places[19:], Batch(0, 1, 19)) == whole
            other = torch.randint(128, (7,))
            alone = model(other, places[:7], Batch(7, 0, 0))
            model(tokens[:19], places[:19], Batch(19, 0, 0))
            both = torch.cat([tokens[19:], other]), torch.cat([places[19:], places[:7]])
            assert model(*both, Batch(7, 1, 19)).tolist() == [whole.item(), alone.item()]
