"""The live cells of the arena: their file, and routers that play in turns."""

import json
import math

import pytest
import yaml
from document_blocks import blocks
from scripts import call, refusal
from unit.openai_endpoint import an_openai_endpoint

from pipelines import arena
from serve_app.live_arena import _summarise, read_live
from serve_app.load_generator import Ask, ReplayedAnswer
from tokenyard.routing.scenario import load_scenario

CELL = {"scenario": "conversation", "rate": 20, "length_scale": 0.02, "slo_response_s": 5.0}


def a_file(tmp_path, routers, **fields):
    known = {"routers": routers, "cells": {"chat": CELL}, "repeats": 2, "duration_s": 1.0}
    path = tmp_path / "live.yaml"
    path.write_text(yaml.safe_dump(known | fields))
    return path


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"routers": {"a": "http://a"}}, "routers: "),
        ({"cells": {"chat": {"speed": 2}}}, "cell chat: no option 'speed' of traffic"),
        ({"warm_up_s": 1.0}, "leaves nothing of duration_s to judge"),
        ({"repeat": 3}, "repeat: "),
        ({"cells": {"chat": {"scenario": "nothing"}}}, "nothing"),
        ({"cells": {"chat": CELL | {"rate": "fast"}}}, "cell chat: rate: "),
    ],
)
def test_a_file_that_means_nothing_is_refused(fields, why, tmp_path):
    with an_openai_endpoint("m") as (_, url):
        path = a_file(tmp_path, **{"routers": {"a": url, "b": url}} | fields)
        assert why in refusal(arena, "--live", path, "--page", tmp_path / "page.html")


def test_what_a_file_names_is_no_option(tmp_path):
    path = a_file(tmp_path, {"a": "http://a", "b": "http://b"})
    assert "--live takes" in refusal(arena, "--live", path, "--quick")


def test_a_router_that_does_not_answer_is_named(tmp_path):
    path = a_file(tmp_path, {"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:9"})
    assert "a does not say which model" in refusal(
        arena, "--live", path, "--page", tmp_path / "page.html"
    )


def test_the_example_of_the_page_can_be_read(tmp_path):
    [block] = [one for one in blocks("docs/arena.md") if one.marks.get("file") == "live.yaml"]
    (tmp_path / "live.yaml").write_text(block.text)
    cells = read_live(tmp_path / "live.yaml").cells
    assert [*cells] == ["chat", "mine"]
    assert load_scenario(cells["chat"]["scenario"]).arrivals.process != "closed"


def test_all_routers_play_the_same_requests_with_other_words(tmp_path):
    with an_openai_endpoint("m") as (first, a), an_openai_endpoint("m") as (second, b):
        path = a_file(tmp_path, {"one": a, "other": b}, learn_s=1.0)
        call(arena, "--live", path, "--page", tmp_path / "page.html", "--json", tmp_path / "rows")
    *rows, best, last = json.loads((tmp_path / "rows").read_text())["rows"]
    assert {row["entry"] for row in rows} == {"one", "other"}
    assert {(row["kind"], row["cell"], row["stream_count"]) for row in rows} == {
        ("live", "chat", 2)
    }
    assert {row["cell"] for row in (best, last)} == {"all"}
    assert all(row["mean_response_s"] >= row["mean_ttft_s"] > 0.0 for row in rows)
    assert {row["dropped_fraction"] for row in rows} == {0.0}
    lengths = [sorted(body["max_tokens"] for body in each.asked) for each in (first, second)]
    assert lengths[0] == lengths[1]
    assert 20 < len(lengths[0]) < 120
    words = [{body["prompt"] for body in each.asked[1:]} for each in (first, second)]
    assert not words[0] & words[1]
    assert "one" in (tmp_path / "page.html").read_text()


def test_what_fails_counts_as_the_longest_wait_and_a_warm_up_does_not():
    asks = [Ask(float(at), (), 1) for at in range(4)]
    lost = ReplayedAnswer(math.nan, math.nan, 0, 0, "500")
    answers = [
        ReplayedAnswer(9.0, 8.0, 1, 1, None),
        lost,
        ReplayedAnswer(1.0, 0.5, 1, 1, None),
        lost,
    ]
    measured = _summarise(asks, answers, 1.0, 5.0)
    # The run ends at 9 s.
    assert measured["mean_response_s"] == pytest.approx((9.0 + 1.0 + 9.0) / 3)
    assert measured["mean_ttft_s"] == pytest.approx((8.0 + 0.5 + 8.0) / 3)
    assert measured["dropped_fraction"] == pytest.approx(2 / 3)
    assert measured["slo_violation_fraction"] == pytest.approx(2 / 3)
