"""A champion for one's own fleet and trace: what is accepted, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokenyard.routing import own_traffic
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.gate import tail_is_longer
from tokenyard.routing.own_traffic import OwnTraffic
from tokenyard.routing.policies import is_rule
from tokenyard.routing.validation import outcome_row, policy_runs
from tokenyard.workload.model import load_model
from tokenyard.workload.trace import Trace

FLEET = """
fleet:
  replicas:
    - {name: slow, gpu: l4, model: llama3_8b}
    - {name: fast, gpu: a100_80g_sxm, model: llama3_8b}
slo_response_s: 10.0
"""


def drawn(num: int, rate_per_s: float = 4.0, seed: int = 3) -> Trace:
    return load_model("azure_code").generate(num, np.random.default_rng(seed), rate_per_s)


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    path = tmp_path / "two.yaml"
    path.write_text(FLEET)
    return str(path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and searches that end in seconds."""
    monkeypatch.setattr(own_traffic, "_REQUESTS", 200)
    monkeypatch.setattr(own_traffic, "_CHOICE_STREAMS", 5)
    monkeypatch.setattr(own_traffic, "_GENERATIONS", 1)
    monkeypatch.setattr(own_traffic, "_SEARCHED", (0,))
    monkeypatch.setattr(own_traffic, "FEWEST_JUDGING", 200)


def trained(fleet: str, tmp_path: Path, load: float, minutes: float = 5) -> own_traffic.Found:
    return OwnTraffic(fleet, drawn(900), tmp_path / "mine.json", minutes, load).train()


@pytest.mark.usefixtures("small")
def test_what_is_accepted_is_faster_than_the_foundation_on_the_last_part(
    fleet: str, tmp_path: Path
) -> None:
    found = trained(fleet, tmp_path, 0.8)
    foundation, choice = found.rows[:2]
    assert foundation["policy"] == DEFAULT_RULE
    assert foundation["stream_count"] == choice["stream_count"] >= 5
    artifact = found.choice.artifact
    assert (
        is_rule(found.choice.name) if artifact is None else artifact.metadata.num_replicas is None
    )
    assert any(remark.startswith("chosen: ") for remark in found.remarks)
    if found.accepted:
        assert float(choice["delta_mean_ci_high"]) < 0.0
        assert not any(tail_is_longer(row) for row in found.rows)


@pytest.mark.usefixtures("small")
def test_equal_arguments_give_the_same_candidate(fleet: str, tmp_path: Path) -> None:
    first, second = (trained(fleet, tmp_path, 0.6) for _ in range(2))
    assert first.choice.name == second.choice.name
    assert first.remarks == second.remarks
    assert first.rows[1]["mean_response_s"] == second.rows[1]["mean_response_s"]


@pytest.mark.usefixtures("small")
def test_without_time_only_rules_are_played(fleet: str, tmp_path: Path) -> None:
    found = trained(fleet, tmp_path, 0.9, minutes=0)
    assert found.choice.artifact is None
    assert is_rule(found.choice.name)
    assert not any("search" in remark for remark in found.remarks)
    # On the stretch that it was chosen by it is no worse than the rule that is there anyway.
    own = OwnTraffic(fleet, drawn(900), tmp_path / "mine.json", 0, 0.9)
    best, default = own._best_rules()[0], own.foundation
    streams = own._windows(own._learned, 1)
    scores = [policy_runs(own.scenario, streams, one.policy)[0].outcomes for one in (best, default)]
    slo_s = own.scenario.slo_response_s
    ours, theirs = (outcome_row(one, slo_s)[0] for one in scores)
    assert ours >= theirs


def test_a_trace_that_is_too_short_is_refused(fleet: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves 300 to judge by"):
        OwnTraffic(fleet, drawn(1000), tmp_path / "mine.json", 1.0)


def test_a_trace_beyond_the_fleet_is_refused(fleet: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="times what the fleet can do; --load"):
        OwnTraffic(fleet, drawn(2000, rate_per_s=500.0), tmp_path / "mine.json", 1.0)


def test_a_file_without_replicas_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    path.write_text("description: nothing\n")
    with pytest.raises(ValueError, match="neither `fleet` nor `servers`"):
        OwnTraffic(str(path), drawn(2000), tmp_path / "mine.json", 1.0)


def test_a_scenario_file_gives_servers_and_slos(tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text(
        "name: x\ndescription: y\nslo_response_s: 3.0\narrivals: {load: 0.5}\n"
        "servers:\n  - {name: a, tokens_per_s: 4000, concurrency: 4}\n"
        "  - {name: b, tokens_per_s: 9000, concurrency: 9}\n"
    )
    own = OwnTraffic(str(path), drawn(2000, rate_per_s=2.0), tmp_path / "mine.json", 1.0)
    assert own.scenario.slo_response_s == 3.0
    assert own.scenario.name == "mine"
    assert own.scenario.arrivals.rate_per_s == pytest.approx(2.0, rel=0.3)
