from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipelines import calibrate
from serve_app.cluster import EngineProfile
from tokenyard.perf.calibration import predicted, with_engine
from tokenyard.perf.hardware import shipped_calibration
from tokenyard.perf.profiles import VIDUR_FOLDER
from tokenyard.perf.published import read_published
from tokenyard.routing.fleet import Fleet
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.streams import StreamSource

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrate") / "rows.json"
    calibrate.main(calibrate.Args(json=out))
    result = json.loads(out.read_text())
    assert {"command", "versions", "seed", "git_sha", "rows"} <= set(result)
    return result["rows"]


@pytest.mark.recorded(VIDUR_FOLDER)
def test_kernels_of_a_held_out_model_are_met_within_eight_percent(rows):
    kernels = [row for row in rows if row["table"] == "kernels"]
    assert {row["gpu"] for row in kernels} == {"a100", "h100"}
    for row in kernels:
        assert row["measurements"] == 2088
        assert row["held_out_70b_error_fraction"] <= 0.08
        assert row["held_out_7b_error_fraction"] <= 0.08
        assert row["cross_validated_error_fraction"] <= 0.08


@pytest.mark.recorded(VIDUR_FOLDER)
def test_end_to_end_figures_held_out_are_met_within_twelve_percent(rows):
    groups = {
        (row["group"], row["role"]): row for row in rows if row["table"] == "end_to_end_groups"
    }
    row = groups["all", "held_out"]
    assert row["figures"] == 112
    assert row["mean_abs_error_fraction"] <= 0.12


@pytest.mark.recorded(VIDUR_FOLDER)
def test_the_shipped_parameters_are_those_that_the_command_fits(rows):
    shipped = shipped_calibration()
    (engine,) = (row for row in rows if row["table"] == "engine_parameters")
    kernels = {row["gpu"]: row for row in rows if row["table"] == "kernel_parameters"}
    for gpu, fitted in shipped.kernels.items():
        for key, value in fitted.model_dump().items():
            assert kernels[gpu][key] == pytest.approx(value, rel=1e-3)
    for key in ("kv_efficiency", "attention_efficiency"):
        assert engine[key] == pytest.approx(getattr(shipped.engine, key), rel=1e-3)
    # One model alone does not tell the cost of an iteration from that of its layers: only what both
    # come to is fitted. It must be the same for that model, and nearly so for all others.
    fixed = ("iteration_overhead_s", "overhead_scale")
    refitted = shipped.engine.model_copy(update={key: engine[key] for key in fixed})
    for role, tolerance in (("fitted", 1e-4), ("held_out", 1e-3)):
        figures = [figure for figure in read_published() if figure.role == role]
        np.testing.assert_allclose(
            predicted(figures, with_engine(shipped, refitted)),
            predicted(figures, shipped),
            rtol=tolerance,
        )


def test_ones_own_iterations_give_four_coefficients(tmp_path, capsys):
    lines = [
        f"{p},{s},{s * c},{0.01 + 5e-5 * p + 4e-5 * s + 2e-7 * s * c}"
        for p in (0, 256, 1024)
        for s in (1, 16, 64)
        for c in (100, 1000, 2000)
    ]
    own = tmp_path / "own.csv"
    header = "prefill_tokens,decoding_sequences,kv_tokens,time_s"
    own.write_text("\n".join([header, *lines]) + "\n")
    out = tmp_path / "rows.json"
    calibrate.main(calibrate.Args(iterations=own, json=out))
    (row,) = json.loads(out.read_text())["rows"]
    assert row["iteration_s"] == pytest.approx(0.01, rel=1e-3)
    assert row["kv_token_s"] == pytest.approx(2e-7, rel=1e-3)
    assert row["held_out_error_fraction"] < 1e-3
    told = capsys.readouterr()
    [line] = [one for one in told.out.splitlines() if one.startswith("profile: ")]
    profile = EngineProfile.model_validate(yaml.safe_load(line)["profile"])
    assert profile.iteration.tolist() == pytest.approx([0.01, 5e-5, 4e-5, 2e-7], rel=1e-3)
    assert (profile.max_batch, profile.token_budget, profile.kv_capacity_tokens) == (
        64, 1024 + 64, 64 * 2000,
    )  # fmt: skip
    assert "put the engine's own limits there" in told.out
    assert "warning" not in told.err


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        # No prompt at all, and cached tokens that only grow with the sequences.
        ([(0, s, 100 * s, 0.01 + 1e-4 * s) for s in range(1, 60)],
         ["prefill_token_s", "sequence_s", "kv_token_s"]),
        # What one cached token costs is lost in noise of a tenth.
        ([(32 * (i % 5), 1 + i % 7, 10 * (i % 11), (0.01 + 1e-3 * (i % 5)) * (0.9 + 0.2 * (i % 2)))
          for i in range(200)], ["sequence_s", "kv_token_s"]),
    ],
)  # fmt: skip
def test_coefficients_that_iterations_do_not_tell_are_named(tmp_path, capsys, rows, names):
    own = tmp_path / "own.csv"
    lines = ["prefill_tokens,decoding_sequences,kv_tokens,time_s"]
    own.write_text("\n".join([*lines, *(",".join(map(str, row)) for row in rows)]) + "\n")
    calibrate.main(calibrate.Args(iterations=own))
    told = capsys.readouterr().err
    assert told.splitlines() == [
        f"warning: {name} is not told from 0 by these iterations" for name in names
    ]


def test_a_file_of_iterations_that_is_not_there_ends_with_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="No such file"):
        calibrate.main(calibrate.Args(iterations=tmp_path / "none.csv"))


PROFILE = {
    "iteration_s": 0.05, "prefill_token_s": 0.001, "sequence_s": 0.01, "kv_token_s": 0.0,
    "max_batch": 4, "token_budget": 64, "kv_capacity_tokens": 20000.0, "source": "estimated",
}  # fmt: skip


@pytest.fixture
def gateway():
    """A server that answers /v1/pools as the gateway does, to callers with the right token."""
    answers = {"replicas": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            allowed = self.headers.get("Authorization") == "Bearer secret"
            body = json.dumps(answers).encode()
            self.send_response(200 if allowed and self.path == "/v1/pools" else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


def test_replicas_behind_a_gateway_become_a_scenario_that_can_be_simulated(gateway, tmp_path):
    url, answers = gateway
    answers["replicas"] = [
        {"replica_id": "x", "pool": "slow", "profile": PROFILE},
        {"replica_id": "b", "pool": "fast", "profile": {**PROFILE, "max_batch": 16}},
        {"replica_id": "a", "pool": "fast", "profile": {**PROFILE, "iteration_s": 0.02}},
    ]
    out = tmp_path / "mine.yaml"
    args = calibrate.Args(url=url, token="secret", out=out, json=tmp_path / "rows.json")
    calibrate.main(args)
    scenario = load_scenario(str(out))
    assert scenario.name == "mine"
    assert scenario.server_names == ("fast-0", "fast-1", "slow-0")
    assert [replica.max_batch for replica in scenario.fleet.replicas] == [4, 16, 4]
    assert scenario.fleet.replicas[0].iteration.tolist() == [0.02, 0.001, 0.01, 0.0]
    assert scenario.workload == load_scenario(args.scenario).workload
    assert scenario.fleet.classes == Fleet.model_fields["classes"].default, "none was told"
    assert "Profiles of replicas: 3 as estimated." in scenario.description
    assert "as no other is told" in scenario.description
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 3
    sim = make_simulator(scenario, 1, 50)
    sim.load(0, StreamSource(scenario).sample(50, np.random.default_rng(0)))
    sim.run_linear(np.zeros(sim.num_weights), 1000.0)
    assert np.isfinite(sim.view().outcomes().response_s).all()


def test_one_model_of_several_is_asked_for_and_taken_with_its_profiles_and_the_classes(
    gateway, tmp_path, capsys
):
    url, answers = gateway
    declared = PROFILE | {"source": "declared"}
    answers["replicas"] = [
        {"replica_id": "x", "pool": "one", "model": "small", "profile": declared},
        {"replica_id": "y", "pool": "one", "model": "small", "profile": PROFILE},
        {"replica_id": "z", "pool": "two", "model": "large", "profile": PROFILE},
    ]
    answers["classes"] = [
        {"name": "default", "response_s": 30.0, "ttft_s": None, "tpot_s": None,
         "max_wait_s": None, "admitted_fraction": 1.0},
        {"name": "chat", "response_s": 15.0, "ttft_s": 2.0, "tpot_s": 0.1,
         "max_wait_s": 1.0, "admitted_fraction": 0.5},
    ]  # fmt: skip
    args = {"url": url, "token": "secret", "out": tmp_path / "mine.yaml"}
    with pytest.raises(SystemExit, match="serves large, small: give --model NAME"):
        calibrate.main(calibrate.Args(**args))
    with pytest.raises(SystemExit, match="no replica of model 'huge'; it serves large, small"):
        calibrate.main(calibrate.Args(**args, model="huge"))
    calibrate.main(calibrate.Args(**args, model="small"))
    scenario = load_scenario(str(args["out"]))
    assert scenario.server_names == ("one-0", "one-1")
    assert [one.model_dump(exclude_defaults=True) for one in scenario.fleet.classes] == [
        {"name": "default", "response_s": 30.0},
        {"name": "chat", "response_s": 15.0, "ttft_s": 2.0, "tpot_s": 0.1, "max_wait_s": 1.0},
    ]
    assert scenario.slo_response_s == 30.0
    told = capsys.readouterr().out
    assert "Profiles of replicas: 1 as declared and 1 as estimated." in told
    assert "SLOs: the gateway's. How many requests each class has is not known" in told


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": "wrong"}, "401"),
        ({}, "knows of no replica"),
        ({"url": "http://127.0.0.1:9"}, "Connection refused"),
        ({"url": "http://[::1"}, "no answer from"),
        ({"out": Path("mine.json")}, "must end in .yaml"),
    ],
)
def test_a_gateway_that_tells_nothing_ends_the_calibration_with_the_reason(
    gateway, change, reason, tmp_path
):
    args = {"url": gateway[0], "token": "secret", "out": tmp_path / "mine.yaml", **change}
    with pytest.raises(SystemExit, match=reason):
        calibrate.main(calibrate.Args(**args))
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize(
    "answer", [{}, {"replicas": [{}]}, {"replicas": [{"replica_id": "x", "pool": "a"}]}]
)
def test_what_is_no_gateway_ends_the_calibration_with_a_sentence(gateway, answer, tmp_path):
    url, answers = gateway
    answers.clear()
    answers.update(answer)
    args = calibrate.Args(url=url, token="secret", out=tmp_path / "mine.yaml")
    with pytest.raises(SystemExit, match="is no gateway: it tells no replicas"):
        calibrate.main(args)
