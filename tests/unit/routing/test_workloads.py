"""Workloads by name: they have the lengths, the turns and the reuse that their sources publish."""

import numpy as np
import pytest

from tokenyard.config import read_named, shipped_names
from tokenyard.routing.scenario import ON, Scenario, load_scenario
from tokenyard.routing.simulator.streams import StreamSource, stream_rng, synthetic_streams
from tokenyard.workload.sessions import session_means

WORKLOADS = shipped_names("tokenyard", "scenarios/workloads")
# Prompt, answer, share of the prompt that was sent before (nan: not published), think time.
PUBLISHED = {
    "interactive_chat": (4000, 300, np.nan, 45),
    "deep_research": (45000, 300, np.nan, 25),
    "reasoning": (1000, 8000, np.nan, np.nan),
    "batch_summarization_rag": (15000, 500, np.nan, 0),
    "batch_synthetic_data": (2500, 4250, np.nan, 0),
    "agentic_trace_replay": (49141, 659, 0.92, 13),
    "mooncake_conversation": (12035, 343, 0.40, np.nan),
    "mooncake_toolagent": (8596, 182, 0.59, np.nan),
    "mooncake_synthetic": (15325, 149, 0.66, np.nan),
}


def on(workload: str, fleet: str, **changes) -> Scenario:
    return load_scenario(f"{workload}{ON}{fleet}").model_copy(update=changes)


def test_there_are_seven_of_the_catalogue_and_three_of_mooncake():
    # The prompts of code_generation are cut to what the model can read; two workloads are our own.
    own = {"code_completion", "conversation_drift"}
    assert {*PUBLISHED, *own, "code_generation"} == set(WORKLOADS)


@pytest.mark.parametrize("workload", sorted(PUBLISHED))
def test_means_are_those_published(workload):
    scenario = on(workload, "equal")
    context, answer, cached, think_s = PUBLISHED[workload]
    means = session_means(scenario.sessions, scenario.workload)
    found = scenario.mean_lengths_tokens
    assert found == pytest.approx((context, answer), rel=0.1)
    if not np.isnan(cached):
        assert 1 - means.fresh_tokens / found[0] == pytest.approx(cached, abs=0.04)
    if not np.isnan(think_s):
        assert means.think_s == pytest.approx(think_s, rel=0.1)


@pytest.mark.parametrize("fleet", ["equal", "mixed"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_streams_come_at_the_rate_of_the_scenario(workload, fleet):
    scenario = on(workload, fleet)
    source = StreamSource(scenario)
    stream = source.sample(1000, stream_rng(1, "training"))
    rows = stream.requests
    rate_per_s = (len(rows) - 1) / (rows[-1, 0] - rows[0, 0])
    # What agents wait for has a tail that a thousand requests do not show.
    assert rate_per_s == pytest.approx(source.rate_per_s, rel=0.35)
    clients = 0
    if scenario.arrivals.process == "closed":
        clients = round(source.rate_per_s * scenario.cycle_s)
    assert stream.num_clients == clients


def test_the_load_is_told_as_if_nothing_and_as_if_all_repeated_were_cached():
    scenario = on("interactive_chat", "mixed", requests_per_stream=200)
    source = StreamSource(scenario)
    streams = synthetic_streams(source, 1, 3, load_factor=2.0)
    assert streams.warm_load == pytest.approx(2 * scenario.arrivals.warm_load)
    assert streams.offered_load > streams.warm_load


@pytest.mark.parametrize("load", [0.05, 1.2])
@pytest.mark.parametrize("name", ["interactive_chat@equal", "deep_research@mixed"])
def test_any_load_can_be_asked_for(name, load):
    workload, _, fleet = name.partition(ON)
    scenario = on(workload, fleet, requests_per_stream=400)
    source = StreamSource(scenario)
    factor = load / source.offered_load
    streams = synthetic_streams(source, 1, 4, load_factor=factor)
    assert streams.offered_load == pytest.approx(load)
    rate_per_s = factor * source.rate_per_s
    if scenario.arrivals.process == "closed":
        clients = scenario.num_clients(rate_per_s)
        assert streams.requests[0].num_clients == clients
        assert f"{clients} closed clients" in streams.origin
        return
    assert "the scenario's lengths, session arrivals" in streams.origin
    arrival_s = streams.requests[0].requests[:, 0]
    assert len(arrival_s) / (arrival_s[-1] - arrival_s[0]) == pytest.approx(rate_per_s, rel=0.3)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("interactive_chta@mixed", "did you mean 'interactive_chat'"),
        ("interactive_chat@mixt", "did you mean 'mixed'"),
    ],
)
def test_a_wrong_name_says_which_is_close(name, says):
    with pytest.raises(ValueError, match=says):
        load_scenario(name)


def test_outputs_drift_while_the_prediction_stays():
    drifting = on("conversation_drift", "jitter")
    steady = drifting.model_copy(update={"output_drift": 1.0})
    size = dict(num_requests=6000, rng=np.random.default_rng(2))
    trace = StreamSource(drifting)._draw(**size)
    size["rng"] = np.random.default_rng(2)
    same = StreamSource(steady)._draw(**size)
    ratio = trace.generated_tokens / same.generated_tokens
    assert ratio[:500].mean() == pytest.approx(1.0, abs=0.05)
    assert ratio[-500:].mean() == pytest.approx(145 / 247, abs=0.05)
    np.testing.assert_array_equal(trace.context_tokens, same.context_tokens)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arrivals": {"clients": 3}}, "clients are of a closed process"),
        ({"arrivals": {"load": 0.5, "warm_load": 0.5}}, "exactly one"),
        ({"arrivals": {"process": "closed", "clients": 3}}, "need sessions"),
        ({"sessions": {}, "output_drift": 0.5}, "without sessions"),
        ({"sessions": {}, "arrivals": {"load": 0.5, "diurnal": {}}}, "diurnal is for traffic wi"),
    ],
)
def test_what_does_not_fit_is_refused(changes, says):
    base = load_scenario("multi_turn_prefix").model_dump(exclude={"sessions"})
    with pytest.raises(ValueError, match=says):
        Scenario.model_validate(base | changes)


def test_a_workload_plays_on_a_fleet_from_a_file(tmp_path):
    shipped = read_named("mixed", "fleet", "tokenyard", "scenarios/fleets")
    fleet = tmp_path / "mine.yaml"
    fleet.write_text(shipped, encoding="utf-8")
    scenario = load_scenario(f"code_generation@{fleet}")
    assert scenario.required_fleet == load_scenario("code_generation@mixed").required_fleet
    fleet.write_text("description: nobody", encoding="utf-8")
    with pytest.raises(ValueError, match="give exactly one of servers and fleet"):
        load_scenario(f"code_generation@{fleet}")
    with pytest.raises(ValueError, match="No such file"):
        load_scenario("code_generation@missing.yaml")
