from pathlib import Path

import numpy as np
import pytest

from pipelines import fit_workload
from tokenyard.allocation.demand import VM_CPU_FILE, DemandGenerator, shipped_generator
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.workload.model import load_model
from tokenyard.workload.trace import Trace


@pytest.fixture
def own(tmp_path):
    """A plain trace of 1000 requests, ten in a burst every second."""
    path = tmp_path / "mine.csv"
    lines = [f"{i // 10 + 0.01 * (i % 10)},{100 + i % 7},{5 + i % 3}" for i in range(1000)]
    path.write_text("arrival_s,context_tokens,generated_tokens\n" + "\n".join(lines))
    return path


def test_a_trace_of_ones_own_becomes_a_workload_for_scenarios(own, tmp_path, capsys):
    out = tmp_path / "mine.json"
    fit_workload.main(fit_workload.Args(trace=own, out=out))
    assert "700 requests" in capsys.readouterr().out
    model = load_model(str(out))
    assert model.name == "mine"
    assert model.arrivals.mean_rate_per_s == pytest.approx(10, rel=0.05)
    scenario = load_scenario("emulated").model_copy(update={"workload": str(out)})
    context, output = scenario.mean_lengths_tokens
    assert (context, output) == pytest.approx((103, 6), rel=0.01)
    assert len(StreamSource(scenario).sample(50, np.random.default_rng(0))) == 50


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"out": None}, "--trace and --out together"),
        ({"out": "mine.yaml"}, "must end in .json"),
        ({"out": "mine.json", "train_fraction": 0.0}, "must lie in"),
        ({"out": "mine.json", "length_scale": -1.0}, "length factor -1.0 must be positive"),
        ({"out": "mine.json", "length_scale": 1e30}, "makes a request of 1e.32 tokens"),
        ({"out": "mine.json", "trace": Path("gone.csv")}, "gone.csv"),
        ({"out": "mine.json", "dt_s": 0.0}, "a step of 0 s must be positive"),
        ({"out": "mine.json", "dt_s": float("nan")}, "a step of nan s must be positive"),
        ({"out": "mine.json", "train_fraction": 0.0001}, "0 requests at one instant"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_one_sentence(own, tmp_path, fields, reason):
    if fields["out"]:
        fields = fields | {"out": tmp_path / fields["out"]}
    with pytest.raises(SystemExit, match=reason):
        fit_workload.main(fit_workload.Args(**({"trace": own} | fields)))


def test_a_trace_without_a_token_is_refused(tmp_path):
    path = tmp_path / "empty.csv"
    lines = [f"{i},0,0" for i in range(50)]
    path.write_text("arrival_s,context_tokens,generated_tokens\n" + "\n".join(lines))
    with pytest.raises(SystemExit, match="no request of the trace has a token"):
        fit_workload.main(fit_workload.Args(trace=path, out=tmp_path / "empty.json"))


@pytest.mark.recorded(VM_CPU_FILE)
def test_the_shipped_generator_of_demand_is_what_the_command_writes(tmp_path):
    out = tmp_path / "demand.json"
    fit_workload.main(fit_workload.Args(demand=True, out=out))
    written = DemandGenerator.model_validate_json(out.read_text())
    shipped = shipped_generator()
    assert written.provenance == shipped.provenance
    assert written.profile == pytest.approx(shipped.profile)
    assert written.day_std == pytest.approx(shipped.day_std)


def test_a_workload_file_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"workload model gone\.json: No such file"):
        load_model("gone.json")


def test_scaled_lengths_are_whole_and_at_least_one():
    trace = Trace(np.array([0.0, 1.0]), np.array([100, 4]), np.array([19, 0]))
    scaled = trace.with_lengths_scaled(0.1)
    assert scaled.context_tokens.tolist() == [10, 1]
    assert scaled.generated_tokens.tolist() == [1, 1]
