from __future__ import annotations

import numpy as np
import pytest

from tokenyard.evaluation import compare
from tokenyard.figures import (
    BASELINE,
    ON_TIME,
    VIOLATION,
    draw_differences,
    draw_learning_curves,
    draw_trade_off,
    save_figures,
)
from tokenyard.problem import Measure
from tokenyard.routing import figures
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.workload.trace import Trace

SCENARIO = load_scenario("poisson_085")
NAMES = ("round_robin", "least_loaded", "sed", "sed_dump")


@pytest.fixture(scope="module")
def evaluated():
    source = StreamSource(SCENARIO)
    requests = [source.sample(400, stream_rng(3, "evaluation", i)) for i in range(2)]
    streams = StreamSet(requests, "test")
    runs = {name: PROBLEM.candidate(SCENARIO, name).run(SCENARIO, streams, 0) for name in NAMES}
    return runs, compare(PROBLEM, SCENARIO, streams, runs, "sed")


def draw(evaluated):
    return figures.draw_evaluation(SCENARIO, *evaluated, "Traffic: a test")


def labels(figure) -> str:
    return " ".join(axes.get_xlabel() + " " + axes.get_ylabel() for axes in figure.axes)


def test_every_figure_of_the_paper_is_drawn_with_units_and_its_source(evaluated):
    all_figures = draw(evaluated)
    assert set(all_figures) == {
        "reward_per_policy", "response_boxes", "load_trajectories", "response_per_request",
        "violation_heatmap", "violations_per_policy", "token_histograms", "request_counts",
    }  # fmt: skip
    for figure in all_figures.values():
        assert labels(figure).strip()
        assert figure.get_supxlabel() == "Traffic: a test"
    assert "response time, s" in labels(all_figures["response_boxes"])
    assert "thousand tokens" in labels(all_figures["load_trajectories"])


@pytest.mark.parametrize(
    ("output_tokens", "patience_s"),
    [pytest.param(1, 1e3, id="answers of one token"), pytest.param(9, 1e-6, id="none is answered")],
)
def test_a_fleet_without_any_time_of_a_kind_is_drawn(output_tokens, patience_s, tmp_path):
    known = load_scenario("two_classes_slo")
    hasty = tuple(
        one.model_copy(update={"timeout_s": patience_s}) for one in known.required_fleet.classes
    )
    fleet = known.required_fleet.model_copy(update={"classes": hasty})
    scenario = known.model_copy(update={"fleet": fleet})
    trace = Trace(np.arange(20.0), np.full(20, 100), np.full(20, output_tokens))
    streams = StreamSet([StreamSource(scenario).encode(trace)], "test")
    runs = {
        name: PROBLEM.candidate(scenario, name).run(scenario, streams, 0)
        for name in ("round_robin", "sed")
    }
    rows = compare(PROBLEM, scenario, streams, runs, "sed")
    drawn = figures.draw_evaluation(scenario, runs, rows, "Traffic: a test")
    assert all(path.is_file() for path in save_figures(drawn, tmp_path))


def test_equal_runs_give_equal_files_under_their_scenario(evaluated, tmp_path):
    folders = [tmp_path / "first", tmp_path / "again"]
    first, again = (
        save_figures(
            {f"poisson_085/{name}": figure for name, figure in draw(evaluated).items()}, folder
        )
        for folder in folders
    )
    assert first[0] == folders[0] / "poisson_085" / "reward_per_policy.png"
    for left, right in zip(first, again, strict=True):
        assert left.read_bytes() == right.read_bytes()


def test_every_server_begins_and_ends_without_load(evaluated):
    runs, _ = evaluated
    for server in range(SCENARIO.num_servers):
        time_s, tokens = figures._load_over_time(runs["sed"][0], server)
        assert (np.diff(time_s) >= 0).all()
        assert tokens.min() >= -1e-6
        assert tokens[0] == 0
        assert tokens[-1] == pytest.approx(0, abs=1e-6)


def test_learning_curves_show_every_repetition_their_median_and_the_rule():
    panels = {
        "reward: response": {
            "ppo": [[(0, -3.0), (50, -2.0), (100, -1.0)], [(0, -3.0), (50, -1.0)]],
            "dqn": [[(0, -2.0)]],
        },
        "reward: paper": {"dqn": [[(0, -1.0), (50, -1.5), (100, -90.0)]]},
    }
    figure = draw_learning_curves(panels, "score, s", ("sed", -1.5), "Two of four rise")
    first, second = figure.axes
    drawn_lines = [line.get_xydata().tolist() for line in first.lines]
    assert [[0.0, -3.0], [50.0, -1.5]] in drawn_lines  # the median, where both have been
    assert len(drawn_lines) == 2 + 1 + 1 + 1 + 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "dqn", "ppo", "the rule"
    ]  # fmt: skip
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(panels)
    # One point that is far off does not press the others flat.
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[0] > -4.0
    assert [text.get_text() for text in second.texts] == ["dqn ends at -90"]
    assert figure.get_suptitle() == "Two of four rise"
    assert figure.get_supylabel() == "score, s"


def test_differences_are_coloured_by_who_is_better_for_certain():
    def row(policy, *gain):
        keys = ("gain_score", "gain_ci_low", "gain_ci_high")
        return {"policy": policy, "baseline": "sed", **dict(zip(keys, gain, strict=True))}

    rows = [
        row("ppo", 0.2, 0.1, 0.3), row("dqn", 0.1, -0.1, 0.3), row("sed", 0.0, 0.0, 0.0),
        row("a2c", -0.2, -0.3, -0.1), row("round_robin", -90.0, -99.0, -80.0),
    ]  # fmt: skip
    score = Measure("score", "score, s", delta="gain_score", more_is_better=True)
    (axes,) = draw_differences(rows, score, "One of three wins").axes
    assert axes.get_xlabel() == "score, difference to sed, s (more is better)"
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "ppo", "dqn", "sed", "a2c", "round robin"
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["◂ -90"]
    assert -1.0 < axes.get_xlim()[0] < -0.3
    points = [line.get_color() for line in axes.lines[2::2]]
    assert points == [ON_TIME, BASELINE, "black", VIOLATION]


def test_a_trade_off_names_its_front_and_who_is_far_off():
    mean = Measure("mean_response_s", "mean s")
    attained = Measure("slo_attainment", "attainment %", factor=100, more_is_better=True)
    points = {"cheap": (1.0, 0.90), "safe": (2.0, 0.99), "both_worse": (2.1, 0.95), "lost": (90, 0)}
    rows = [
        {"policy": name, "mean_response_s": x, "slo_attainment": y}
        for name, (x, y) in points.items()
    ]
    figure = draw_trade_off(rows, mean, attained, {"safe": "ppo", "cheap": "a2c"})
    axes = figure.axes[0]
    assert {text.get_text() for text in axes.texts} == {"cheap", "safe"}
    assert axes.get_title(loc="left") == "far off: lost"
    assert axes.get_xlabel() == "mean s, less is better"
    assert axes.get_ylabel() == "attainment %, more is better"
    assert figure.get_suptitle() == "2 of 2 trials are on the Pareto front"
    assert [c.get_label() for c in axes.collections] == ["a2c", "ppo", "rule"]
    assert sum(len(c.get_offsets()) for c in axes.collections) == 3
    front = axes.lines[0].get_xydata()
    np.testing.assert_allclose(front, [(1.0, 90.0), (2.0, 99.0)])
