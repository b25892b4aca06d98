"""`tokenyard compare` from files to a page: gains, none, and none claimed."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from unit.prometheus_server import serving

from pipelines import compare
from tokenyard.routing import own_traffic
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.load_sweep import crossing
from tokenyard.routing.own_traffic import Choice, OwnTraffic, Traffic
from tokenyard.routing.simulator.streams import StreamSource, trace_streams
from tokenyard.workload.model import load_model, poisson_arrivals
from tokenyard.workload.trace import Trace

FLEET = """
fleet:
  replicas:
    - {name: slow, gpu: l4, model: llama3_8b}
    - {name: fast, gpu: a100_80g_sxm, model: llama3_8b}
slo_response_s: 10.0
"""
ROLES = {"now", "default", "best_rule"}
KEYS = {
    "policy", "role", "offered_load", "mean_response_s", "p99_response_s", "mean_ttft_s",
    "slo_attainment_fraction", "sustainable_load_per_s", "delta_mean_fraction",
    "delta_mean_ci_low", "delta_mean_ci_high", "delta_p99_fraction", "delta_p99_ci_low",
    "delta_p99_ci_high", "delta_slo_violation", "delta_slo_ci_low", "delta_slo_ci_high",
    "twin_error_fraction",
}  # fmt: skip
"""Frozen names (docs/metrics.md)."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short streams for what is compiled only once."""
    monkeypatch.setattr(own_traffic, "_REQUESTS", 200)


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    (tmp_path / "two.yaml").write_text(FLEET)
    return str(tmp_path / "two.yaml")


def demand(num: int, rate_per_s: float) -> Trace:
    """Poisson arrivals with the lengths of code completion."""
    rng = np.random.default_rng(3)
    lengths = load_model("azure_code").sample_lengths(num, rng)
    return Trace(poisson_arrivals(num, rate_per_s, rng), *lengths)


def written(path: Path, trace: Trace) -> str:
    """A trace as the CSV file that README asks for."""
    columns = {
        "arrival_s": trace.arrival_s,
        "context_tokens": trace.context_tokens,
        "generated_tokens": trace.generated_tokens,
    }
    if trace.response_s is not None:
        columns["response_s"] = trace.response_s
    rows = np.column_stack(list(columns.values()))
    np.savetxt(path, rows, fmt="%.6g", delimiter=",", header=",".join(columns), comments="")
    return str(path)


def test_a_page_says_what_the_best_rule_gains_and_how_much_load_the_slos_allow(
    tmp_path: Path, fleet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "mine.csv", demand(3600, 6.0))
    page, result = tmp_path / "page.html", tmp_path / "rows.json"
    compare.main(
        compare.Args(trace=trace, fleet=fleet, now="nginx", load=0.8, html=page, json=result)
    )
    rows = json.loads(result.read_text())["rows"]
    assert {row["role"] for row in rows} <= ROLES
    assert all(row.keys() >= KEYS for row in rows)
    at_load = [row for row in rows if math.isclose(row["offered_load"], 0.8)]
    now, *others = at_load
    assert (now["policy"], now["role"]) == ("round_robin", "now")
    assert DEFAULT_RULE in {row["policy"] for row in others}
    for row in others:
        # Half of the requests go to a GPU that is several times as slow, where the queue grows:
        # its mean has no interval.
        assert row["delta_mean_ci_high"] is None
        assert row["delta_mean_fraction"] < -0.9
        assert row["delta_slo_ci_high"] < -0.4
        assert row["sustainable_load_per_s"] > 1.3 * now["sustainable_load_per_s"]
    assert all(row["requests"] == 1080 for row in rows)
    # Within its loads, and nowhere above what is offered at the most.
    assert 0.0 < now["sustainable_load_per_s"] < max(row["rate_per_s"] for row in rows)
    html = page.read_text()
    assert re.search(r"keeps 9\d.\d% of the requests in their SLOs, today&#39;s round_robin", html)
    assert "<svg" in html
    assert not re.search(r"(src|href)=.?http", html), "the page needs nothing else"
    assert "Nothing says how far the simulator is" in capsys.readouterr().out


def test_where_today_is_the_best_rule_it_says_that_nothing_is_to_be_gained(
    tmp_path: Path, fleet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request at a time leaves nothing to order, and little to place."""
    trace = written(tmp_path / "idle.csv", demand(3600, 0.05))
    compare.main(compare.Args(trace=trace, fleet=fleet, now="marginal_delay@1:1"))
    assert "Nothing to gain here" in capsys.readouterr().out


@pytest.mark.parametrize(("slower", "refused"), [(1.0, False), (1.5, True)])
def test_measured_times_tell_a_wrong_fleet_file(
    tmp_path: Path, fleet: str, slower: float, refused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = demand(3600, 6.0)
    own = OwnTraffic(Traffic(trace, fleet), tmp_path / "model.json", 0)
    streams = trace_streams(StreamSource(own.scenario), trace, 1, native_time=True)
    (run,) = Choice("least_connections").runs(own.scenario, streams)
    timed = Trace(
        trace.arrival_s, trace.context_tokens, trace.generated_tokens,
        response_s=slower * run.outcomes.response_s,
    )  # fmt: skip
    args = compare.Args(
        trace=written(tmp_path / "timed.csv", timed), fleet=fleet, now="haproxy leastconn",
        html=tmp_path / "page.html",
    )  # fmt: skip
    if refused:
        with pytest.raises(SystemExit) as ended:
            compare.main(args)
        assert ended.value.code == 1
        assert "no gain is claimed" in (tmp_path / "page.html").read_text()
        assert "33% off the measured one, more than 15%" in capsys.readouterr().out
    else:
        rows, verdict = compare.compare(args, Console(quiet=True))
        assert rows[0]["twin_error_fraction"] < 0.01
        assert not verdict.is_refused


def test_a_log_of_an_engine_is_compared_on_the_replicas_that_prometheus_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = demand(3600, 2.0)
    own = OwnTraffic(Traffic(trace, "mixed"), tmp_path / "model.json", 0)
    streams = trace_streams(StreamSource(own.scenario), trace, 1, native_time=True)
    (run,) = Choice("round_robin").runs(own.scenario, streams)
    columns = trace.arrival_s, run.outcomes.response_s, trace.context_tokens, trace.generated_tokens
    lines = [
        json.dumps({
            "timestamp": datetime.fromtimestamp(1.79e9 + came_s + took_s, UTC).isoformat(),
            "event": "request.finished",
            "out": {"meta_info": {
                "prompt_tokens": prompt, "completion_tokens": answer, "e2e_latency": took_s,
            }},
        })
        for came_s, took_s, prompt, answer in zip(*(one.tolist() for one in columns), strict=True)
    ]  # fmt: skip
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "host_0.log").write_text("\n".join(lines))
    with serving() as (url, _):
        args = compare.Args(log=tmp_path / "log", url=url, now="nginx")
        rows, _ = compare.compare(args, Console(quiet=True))
    assert rows[0]["policy"] == "round_robin"
    assert rows[0]["requests"] == 1080
    # The times are those of other replicas.
    assert rows[0]["twin_error_fraction"] > 0.0
    told = capsys.readouterr().err
    assert f"fleet of 2 replicas from {url}" in told
    assert "layout SGLang" in told


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trace": "a.csv"}, "give one of --trace and --log, and one of"),
        (
            {"fleet": "mixed", "trace": "a.csv", "log": Path("b")},
            "give one of --trace and --log, and one of",
        ),
        ({"fleet": "mixed", "trace": "a.csv", "load": 3.0}, "--load 3 must be above 0"),
        ({"fleet": "mixed", "trace": "a.csv", "goal": 1.0}, "--goal 1 must lie between"),
        ({"fleet": "mixed", "trace": "a.csv", "minutes": -1.0}, "--minutes -1 must be at least 0"),
        ({"fleet": "mixed", "trace": "a.csv", "now": "nginx ip_hash"}, "nginx ip_hash is no rule"),
        ({"fleet": "mixed", "trace": "a.csv"}, "trace a.csv is not there"),
    ],
)
def test_wrong_options_end_with_one_sentence(
    options: dict[str, object], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(compare.Args(**options))  # type: ignore[arg-type]
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"compare: {reason}")


def test_the_load_at_which_the_goal_is_lost_lies_between_those_played() -> None:
    assert crossing([0.5, 1.0], [1.0, 0.9], 0.95) == pytest.approx(0.75)
    assert crossing([0.5, 1.0], [0.9, 0.8], 0.95) == 0.0
    assert math.isnan(crossing([0.5, 1.0], [1.0, 0.99], 0.95))
    # The first time counts.
    assert crossing([1.0, 2.0, 3.0], [1.0, 0.9, 1.0], 0.95) == pytest.approx(1.5)


@pytest.mark.recorded("azure_code")
def test_a_recorded_hour_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    args = compare.Args(trace="azure_code", fleet="mixed", now="envoy least_request", load=0.8)
    rows, _ = compare.compare(args, Console())
    assert rows[0]["requests"] == 2646
    assert "sooner on average than today's power_of_two" in capsys.readouterr().out
