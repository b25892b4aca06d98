"""Replicas of vLLM by their metrics in a Prometheus server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from unit.prometheus_server import ANSWER, CACHED, LABELS, PROMPT, TRUE, Prometheus, serving

from tokenyard.routing.live_fleet import write_live
from tokenyard.routing.scenario import load_scenario


@pytest.fixture
def prometheus() -> Iterator[tuple[str, Prometheus]]:
    with serving() as server:
        yield server


BASE = load_scenario("conversation_mixed_gpus")


def test_mean_iterations_and_prompts_take_as_long_as_they_were_seen_to(
    tmp_path: Path, prometheus: tuple[str, Prometheus]
) -> None:
    rows, told = write_live(prometheus[0] + "/", tmp_path / "live.yaml", BASE)
    assert "2 as estimated." in told
    assert "of conversation_mixed_gpus, as no other is told" in told
    fleet = load_scenario(str(tmp_path / "live.yaml")).required_fleet
    fast, slow = fleet.replicas
    assert (fast.name, slow.name) == ("vllm-a", "vllm-b")
    assert fast.kv_capacity_tokens == 16_000
    assert (fast.max_batch, slow.max_batch) == (256, 31), "where something waited, it was full"
    assert fast.token_budget == 2048
    held = PROMPT + ANSWER / 2
    for batch in (8, 20, 40):
        mixed = np.array([1, (1 - CACHED) * PROMPT * batch / ANSWER, batch, batch * held])
        assert fast.iteration @ mixed == pytest.approx(TRUE @ mixed, rel=0.1)
        assert slow.iteration @ mixed == pytest.approx(3 * TRUE @ mixed, rel=0.1)
    assert fast.iteration[1] == pytest.approx(TRUE[1], rel=0.3)
    assert len(rows) == 2


def test_one_model_of_several_is_asked_for(
    tmp_path: Path, prometheus: tuple[str, Prometheus]
) -> None:
    url, known = prometheus
    known.models["slow"] = "n"
    with pytest.raises(ValueError, match="vLLM with m, n: give --model NAME"):
        write_live(url, tmp_path / "live.yaml", BASE)
    rows, _ = write_live(url, tmp_path / "live.yaml", BASE, model="n")
    assert [row["name"] for row in rows] == ["vllm-b"]
    with pytest.raises(ValueError, match="no vllm:num_requests_running"):
        write_live(url, tmp_path / "live.yaml", BASE, model="other")


def test_a_pod_that_was_replaced_is_no_replica(
    tmp_path: Path, prometheus: tuple[str, Prometheus]
) -> None:
    url, known = prometheus
    known.gone = {"fast"}
    rows, _ = write_live(url, tmp_path / "live.yaml", BASE)
    assert [row["name"] for row in rows] == ["vllm-b"]


def test_engines_of_one_server_are_replicas_and_unknown_blocks_count_as_the_default(
    tmp_path: Path, prometheus: tuple[str, Prometheus], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, known = prometheus
    known.blocks["num_gpu_blocks"] = "None"
    monkeypatch.setitem(LABELS, "slow", LABELS["fast"] | {"engine": "1"})
    rows, _ = write_live(url, tmp_path / "live.yaml", BASE)
    assert [row["name"] for row in rows] == ["vllm-a", "vllm-a/1"]
    assert {row["kv_capacity_tokens"] for row in rows} == {131_072.0}


def test_what_has_answered_nothing_has_no_profile(
    tmp_path: Path, prometheus: tuple[str, Prometheus]
) -> None:
    url, known = prometheus
    known.counted = {name: {} for name in LABELS}
    with pytest.raises(ValueError, match="no tokens of vLLM in the last 6 hours"):
        write_live(url, tmp_path / "live.yaml", BASE)


def test_a_server_that_is_neither_a_gateway_nor_prometheus_is_named(tmp_path: Path) -> None:
    with (
        serving(api="/metrics") as (url, _),
        pytest.raises(ValueError, match=r"no gateway or Prometheus at .*: 404"),
    ):
        write_live(url, tmp_path / "live.yaml", BASE)
