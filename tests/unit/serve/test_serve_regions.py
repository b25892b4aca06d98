import asyncio

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client import generate_latest

from serve_app.http.regions import RegionDecider
from serve_app.http.regions_schema import RegionsMessage
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.policies import BEST_RULE, REGION_BASELINES
from tokenyard.regions.types import RegionDecision


def a_region(name, **changes):
    servers = [{"tasks_per_slot": 5.6}] * 3
    servers += [{"tasks_per_slot": 2.0}] * 2
    fields = {
        "region_id": name, "arrivals": [6.0, 7.0], "forecast": [7.0, 8.0, 9.0], "waiting": 1.0,
        "used": 0.6, "num_active": 2, "usd_per_kwh": 0.2, "servers": servers,
    }  # fmt: skip
    return fields | changes


def a_body(**changes):
    fields = {
        "regions": [a_region("a"), a_region("b", usd_per_kwh=0.1), a_region("c")],
        "latency_s": [[0.0, 0.05, 0.1], [0.05, 0.0, 0.05], [0.1, 0.05, 0.0]],
    }
    return fields | changes


class Says:
    """A policy that answers as it is told."""

    def __init__(self, shares):
        self.shares = np.array(shares)

    def decide(self, state):
        return RegionDecision(self.shares, np.ones(3, dtype=int))


class Fails:
    def decide(self, state):
        raise RuntimeError("broken")


def the_rule():
    return REGION_BASELINES[BEST_RULE].tuned(ActivationRule())


def decide(policy, **changes):
    decider = RegionDecider(policy)
    return decider.decide(RegionsMessage.model_validate(a_body(**changes))), decider


def test_the_rule_that_ships_answers_with_shares_and_servers():
    answer, decider = decide(the_rule())
    assert (answer.policy, answer.fallback_reason) == (BEST_RULE, None)
    assert np.sum(answer.shares, axis=1) == pytest.approx(np.ones(3))
    assert all(1 <= count <= 5 for count in answer.active)
    assert decider.describe().fallbacks == {}


NAN = [[np.nan, 0.5, 0.5]] * 3
NO_SHARES = [[0.9, 0.5, 0.5]] * 3


@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        (Says(NAN), {}, "unusable"),
        (Says(NO_SHARES), {}, "unusable"),
        (Says([[1.0]]), {}, "unusable"),
        (Fails(), {}, "error"),
        (the_rule(), {"forecast_age_slots": 9.0}, "stale_forecast"),
        (
            the_rule(),
            {"regions": [a_region(name, forecast=None) for name in "abc"]},
            "no_forecast",
        ),
    ],
)
def test_what_cannot_be_used_falls_back_to_prox_ot_and_is_counted(policy, changes, reason):
    answer, decider = decide(policy, **changes)
    assert (answer.policy, answer.fallback_reason) == ("prox_ot", reason)
    assert np.sum(answer.shares, axis=1) == pytest.approx(np.ones(3))
    assert decider.describe().fallbacks == {f"{reason}:prox_ot": 1}


def test_where_prox_ot_fails_too_everything_stays_local():
    decider = RegionDecider(Fails())
    decider._fallbacks[0] = ("prox_ot", Says(NAN))
    answer = decider.decide(RegionsMessage.model_validate(a_body()))
    assert answer.policy == "local_first"
    assert answer.shares == np.eye(3).tolist()


@pytest.mark.parametrize("changes", [{}, {"arrivals": [0.0], "forecast": [0.0]}])
@pytest.mark.parametrize("age", [0.0, 9.0], ids=["best rule", "prox_ot"])
def test_a_region_that_is_down_is_sent_nothing(changes, age):
    down = {"servers": [], "num_active": 0}
    regions = [a_region("a", **changes), a_region("b", **down, **changes), a_region("c", **changes)]
    answer, _ = decide(the_rule(), regions=regions, forecast_age_slots=age)
    assert np.array(answer.shares)[:, 1] == pytest.approx(np.zeros(3), abs=1e-9)
    assert answer.active[1] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"latency_s": [[0.0]]}, "3 rows of 3 numbers"),
        ({"previous": [[0.5, 0.0, 0.0]] * 3}, "sum to 1"),
        ({"regions": [a_region("a"), a_region("a"), a_region("c")]}, "more than once"),
        ({"regions": [a_region("a", forecast=[1.0]), a_region("b"), a_region("c")]}, "equal"),
    ],
)
def test_bad_telemetry_is_refused_in_words(changes, words):
    with pytest.raises(ValueError, match=words):
        RegionsMessage.model_validate(a_body(**changes))


def test_the_routes_answer_and_count():
    from fastapi import FastAPI

    from serve_app.http import errors
    from serve_app.http.auth import Access
    from serve_app.http.intake import PendingBodies
    from serve_app.http.regions import make_router

    api, decider = FastAPI(), RegionDecider(the_rule())
    access, decide, loops = Access(None), decider.decide, []

    def note_loop(message):
        loops.append(asyncio._get_running_loop())
        return decide(message)

    decider.decide = note_loop
    errors.install(api, access, PendingBodies(10.0, 8))
    api.include_router(make_router(decider, access))
    client = TestClient(api)
    assert client.post("/v1/regions", json=a_body()).json()["policy"] == BEST_RULE
    stale = client.post("/v1/regions", json=a_body(forecast_age_slots=99.0)).json()
    assert stale["fallback_reason"] == "stale_forecast"
    refused = client.post("/v1/regions", json=a_body(slot_s=-1.0))
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("slot_s should be greater")
    assert client.get("/v1/regions").json()["num_decisions"] == 2
    assert loops == [None, None], "transport is solved in a thread, beside the event loop"
    text = generate_latest(decider.registry).decode()
    assert 'tokenyard_region_fallbacks_total{policy="prox_ot",reason="stale_forecast"} 1.0' in text
