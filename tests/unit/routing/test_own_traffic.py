"""A champion for one's own fleet and trace: what is accepted, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tyro

from pipelines import train
from tokenyard.routing import own_traffic
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.gate import tail_is_longer
from tokenyard.routing.own_traffic import OwnTraffic, Traffic
from tokenyard.routing.policies import is_rule
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


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of a few hundred requests are taken."""
    monkeypatch.setattr(own_traffic, "FEWEST_JUDGING", 200)


def trained(fleet: str, tmp_path: Path, load: float, minutes: float = 5) -> own_traffic.Found:
    return OwnTraffic(Traffic(drawn(900), fleet), tmp_path / "mine.json", minutes, load).train()


@pytest.mark.usefixtures("small")
def test_a_search_is_served_where_it_is_faster_than_the_best_rule_on_the_last_part(
    fleet: str, tmp_path: Path
) -> None:
    found = trained(fleet, tmp_path, 0.8)
    default, rule, *searched = (row for row in found.rows if row["part"] == "as recorded")
    assert default["policy"] == DEFAULT_RULE
    assert is_rule(rule["policy"])
    assert default["stream_count"] == rule["stream_count"] == 1
    assert found.choice.name in [row["policy"] for row in (default, rule, *searched)]
    if found.choice.artifact is not None:
        assert float(searched[0]["delta_mean_ci_high"]) < 0.0
        assert not any(tail_is_longer(row) for row in searched)
        assert found.choice.artifact.metadata.num_replicas is None
    elif found.choice.name == rule["policy"]:
        assert float(default["delta_mean_ci_high"]) >= 0.0 or tail_is_longer(default)


@pytest.mark.usefixtures("small")
def test_without_time_only_rules_are_played_and_equal_arguments_find_the_same(
    fleet: str, tmp_path: Path
) -> None:
    first, second = (trained(fleet, tmp_path, 0.9, minutes=0) for _ in range(2))
    assert first.choice.name == second.choice.name
    assert first.remarks == second.remarks
    assert [row["mean_response_s"] for row in first.rows] == [
        row["mean_response_s"] for row in second.rows
    ]
    assert first.choice.artifact is None
    assert {row["policy"] for row in first.rows} >= {DEFAULT_RULE, first.choice.name}


def test_a_trace_that_is_too_short_is_refused(fleet: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves 180 to judge by"):
        OwnTraffic(Traffic(drawn(600), fleet), tmp_path / "mine.json", 1.0)


def test_a_trace_in_milliseconds_is_refused_before_anything_is_fitted(
    fleet: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="are the arrivals in seconds"):
        OwnTraffic(Traffic(drawn(700, rate_per_s=0.005), fleet), tmp_path / "mine.json", 1.0)
    assert not (tmp_path / "mine.json").exists()


def test_a_trace_beyond_the_fleet_is_refused(fleet: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="times what the fleet can do; --load"):
        OwnTraffic(Traffic(drawn(700, rate_per_s=500.0), fleet), tmp_path / "mine.json", 1.0)


@pytest.mark.parametrize("load", [-1.0, 0.0, 9.0, math.nan])
def test_a_load_that_nobody_can_choose_by_ends_with_one_sentence(load: float) -> None:
    with pytest.raises(SystemExit, match=rf"^train: --load {load:g} must be above 0, and at most"):
        train.main(train.Args(fleet="mixed", trace="mine.csv", load=load))


def test_a_file_without_replicas_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    path.write_text("description: nothing\n")
    with pytest.raises(ValueError, match="neither `fleet` nor `servers`"):
        OwnTraffic(Traffic(drawn(700), str(path)), tmp_path / "mine.json", 1.0)


@pytest.mark.parametrize(
    ("replica", "reason"),
    [
        ("{name: a, gpu: h1000, model: llama3_8b}", "known: .*unknown .*'h1000'"),
        ("{name: a, gpu: l4, model: llama3_8b, max_bach: 3}", "known.max_bach: Extra inputs"),
        ("{name: a, iteration_s: .02, sequence_s: 0}", "measured.prefill_token_s: Field required"),
        ("3", "known: Input should be a valid dict"),
    ],
)
def test_a_replica_that_is_misspelled_is_told_in_one_sentence(
    tmp_path: Path, replica: str, reason: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"fleet: {{replicas: [{replica}]}}\n")
    with pytest.raises(ValueError, match=rf"mine.yaml: fleet.replicas.0.{reason}") as caught:
        OwnTraffic(Traffic(drawn(700), str(path)), tmp_path / "mine.json", 1.0)
    assert str(caught.value).count("\n") == 0


def test_a_scenario_file_gives_servers_and_slos(tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text(
        "name: x\ndescription: y\nslo_response_s: 3.0\narrivals: {load: 0.5}\n"
        "servers:\n  - {name: a, tokens_per_s: 4000, concurrency: 4}\n"
        "  - {name: b, tokens_per_s: 9000, concurrency: 9}\n"
    )
    own = OwnTraffic(Traffic(drawn(2000, rate_per_s=2.0), str(path)), tmp_path / "mine.json", 1.0)
    assert own.scenario.slo_response_s == 3.0
    assert own.scenario.name == "mine"
    assert own.scenario.arrivals.rate_per_s == pytest.approx(2.0, rel=0.3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("", "give --trace and --fleet, --log and one of"),
        ("--trace mine.csv", "give --trace and --fleet"),
        ("--log x --fleet mixed --scenario emulated", "give --trace and --fleet"),
        ("--trace mine.csv --fleet mixed --registry x", "a trace does not go with --registry$"),
        ("--log x --fleet mixed --seeds 3", "the log of a fleet does not go with --seeds$"),
        ("--log x --scenario emulated --block-tokens 16", "a scenario .* go with --block-tokens$"),
        ("--scenario emulated --now sed --minutes 3", "without a log .* with --now, --minutes$"),
        ("--scenario abilene", "abilene is of regions: train it with sweep.py"),
        ("--scenario l4x4_7b", "l4x4_7b is of allocation: train it with sweep.py"),
        ("--scenario emulated --out x.csv", "--out x.csv must end in .npz"),
    ],
)
def test_options_that_do_not_go_together_end_with_one_sentence(options: str, reason: str) -> None:
    args = tyro.cli(train.Args, args=options.split())
    with pytest.raises(SystemExit, match=f"^train: .*{reason}"):
        train.main(args)
