"""The autopilot before a real gateway over HTTP: promotion, veto, a process that dies."""

import asyncio
import os
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from rich.console import Console
from unit.serve.test_serve_external import BODY, a_cluster, gateway_before
from unit.stub_endpoint import stubs

from pipelines import autopilot as command
from pipelines.autopilot import (
    Args,
    Autopilot,
    AutopilotState,
    GatewayClient,
    GatewayError,
    Pair,
)
from serve_app.gateway.decision_log import DecisionLog
from serve_app.http.free_port import free_port
from serve_app.http.listener import Listener
from tokenyard.registry import connect, open_experiment
from tokenyard.routing.own_traffic import Choice, Found, Traffic

pytestmark = pytest.mark.integration
DELAYS_S = (0.005, 0.25)
"""Of two endpoints: a policy that asks the first alone is better than round robin by far."""


@contextmanager
def site(folder, policy="round_robin"):
    """Serve two endpoints and callers in a thread; yields the gateway's URL."""
    port, ends, ready = free_port(), threading.Event(), threading.Event()

    async def serve():
        async with stubs(2) as endpoints:
            for endpoint, delay_s in zip(endpoints, DELAYS_S, strict=True):
                endpoint.delay_s = delay_s
            cluster, log = a_cluster(endpoints, {}), DecisionLog(folder, flush_s=0.1)
            async with gateway_before(cluster, log, policy, scrapes=True) as (client, _):
                listener = Listener(client._transport.app, cluster.limits)
                await listener.start("127.0.0.1", port)
                ready.set()

                async def ask():
                    while not ends.is_set():
                        await client.post("/v1/completions", json=BODY)
                        await asyncio.sleep(0.02)

                await asyncio.gather(*(ask() for _ in range(6)))
                await listener.stop()
            log.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield f"http://127.0.0.1:{port}"
    finally:
        ends.set()
        thread.join(30)


@pytest.fixture
def quick(monkeypatch):
    """Stretches of tenths of seconds, and a training that answers what a test wants."""
    monkeypatch.setattr(command, "_FLUSHED_S", 0.3)
    monkeypatch.setattr(command, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(command, "_FEWEST_REQUESTS", 5)
    monkeypatch.setattr(command, "_FEWEST_LOGGED", 1)
    trained = {"choice": "least_connections", "error": 0.05, "now": "round_robin"}

    def train(args, since_s):
        traffic = Traffic(
            None, "fleet.yaml", Choice(trained["now"]), twin_error_fraction=trained["error"]
        )
        choice = Choice(trained["choice"])
        return Found(choice, choice, None, [], []), traffic

    monkeypatch.setattr(command, "_train_in_ray", train)
    return trained


def an_autopilot(url, folder, **options):
    settings = {"act": True, "once": True, "stretch_s": 0.8, "scenario": "conversation_mixed_gpus"}
    args = Args(url=url, log=folder, **(settings | options))
    pilot = Autopilot(args, Console(quiet=True), GatewayClient(url))
    pilot._slo_s = 0.2
    return pilot


def until_logged(folder):
    deadline_s = time.monotonic() + 30
    while not list(folder.glob("decisions-*.parquet")):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def get(url, path):
    return httpx.get(url + path).json()


def test_what_is_better_in_turns_is_promoted_and_reported(tmp_path, quick):
    with site(tmp_path) as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path, alpha=0.05)
        pilot.run()
        assert pilot.state.step == "watching", pilot.state
        assert get(url, "/v1/policy")["active"] == "least_connections"
        report = get(url, "/v1/autopilot")["report"]
        assert report["candidate"] == "least_connections"
        assert report["in_place_of"] == "round_robin"
        assert report["gain_fraction"] > 0.1
        assert [row["step"] for row in pilot.rows][:2] == ["shadow", "comparing"]


def test_what_is_much_worse_is_given_up_and_what_decided_goes_on(tmp_path, quick):
    quick |= {"choice": "round_robin", "now": "least_connections"}
    with site(tmp_path, policy="least_connections") as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path)
        pilot.run()
        assert "given up" in pilot.state.note
        assert get(url, "/v1/policy")["active"] == "least_connections"


def test_a_simulator_that_is_far_off_and_a_dry_run_try_nothing(tmp_path, quick):
    with site(tmp_path) as url:
        until_logged(tmp_path)
        quick["error"] = 0.4
        pilot = an_autopilot(url, tmp_path)
        pilot.run()
        assert "off by 40%" in pilot.state.note
        quick["error"] = 0.05
        registry = f"sqlite:///{tmp_path}/mlflow.db"
        dry = an_autopilot(url, tmp_path, act=False, registry=registry)
        dry.run()
        client = connect(registry)
        runs = client.search_runs([open_experiment(client, "tokenyard-autopilot")])
        nested = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
        assert {run.info.run_name for run in nested} == {"training", "waiting"}
        assert len(runs) == len(nested) + 1
        assert "MLFLOW_TRACKING_URI" not in os.environ
        assert "--act would try least_connections" in dry.state.note
        policies = get(url, "/v1/policies")
        assert policies["experiment"] is None
        assert get(url, "/v1/policy")["num_decisions"] > 0


def test_a_log_that_is_too_short_to_judge_by_ends_the_cycle(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(command, "_FEWEST_LOGGED", 10**6)
    with site(tmp_path) as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path)
        pilot.run()
        assert "1,000,000 are needed" in pilot.state.note


def test_it_goes_on_where_it_died_and_the_turn_it_gave_ends_by_itself(tmp_path, quick, monkeypatch):
    with site(tmp_path) as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path)
        lends = []

        def dies(self, policy, for_s):
            lends.append(policy)
            if len(lends) == 2:
                # As kill -9 in the middle of a turn: nothing is tidied up.
                self.ask("POST", "/v1/policy", {"policy": policy, "for_s": for_s})
                raise KeyboardInterrupt
            return lend(self, policy, for_s)

        lend = GatewayClient.lend
        monkeypatch.setattr(GatewayClient, "lend", dies)
        with pytest.raises(KeyboardInterrupt):
            pilot.run()
        assert get(url, "/v1/policy")["active"] == "least_connections"
        deadline_s = time.monotonic() + 30
        while get(url, "/v1/policy")["active"] != "round_robin":
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        monkeypatch.setattr(GatewayClient, "lend", lend)
        again = an_autopilot(url, tmp_path)
        assert (again.state.step, len(again.state.pairs)) == ("comparing", 1)
        again.run()
        assert get(url, "/v1/policy")["active"] == "least_connections"


def test_a_persons_veto_ends_the_turn_and_the_cycle(tmp_path, quick):
    with site(tmp_path) as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path)
        real = pilot.gateway.lend

        def vetoed(policy, for_s):
            lent = real(policy, for_s)
            answer = httpx.post(url + "/v1/autopilot", json={"veto": True})
            assert answer.json()["vetoed"]
            return lent

        pilot.gateway.lend = vetoed
        pilot.run()
        assert pilot.state.step == "stopped"
        assert get(url, "/v1/policy")["active"] == "round_robin"


def test_what_was_promoted_is_rolled_back_once_it_has_become_worse(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(command, "_WATCH_PAUSE", 0)
    with site(tmp_path, policy="least_connections") as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path, alpha=0.05)
        # Traffic of a moment ago made round robin look better, by pairs that are long past.
        httpx.post(url + "/v1/policy", json={"policy": "round_robin"})
        gone = Pair(
            lent="a", other="b", lent_from_s=0.0, other_from_s=1.0, candidate_is_lent=True, gain=2.0
        )
        pilot.state = AutopilotState(
            step="watching", candidate="round_robin", in_place_of="least_connections",
            pairs=[gone] * 9 + [gone.model_copy(update={"gain": -1.0})] * 5,
            pairs_before_promotion=9, next_s=time.time() + 600.0,
        )  # fmt: skip
        while pilot.state.step == "watching":
            pilot._watch()
        assert "went back to least_connections" in pilot.state.note
        assert get(url, "/v1/policy")["active"] == "least_connections"


def test_a_policy_that_somebody_has_promoted_meanwhile_is_not_compared_with_itself(tmp_path, quick):
    with site(tmp_path) as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path)
        pilot.state = AutopilotState(
            step="comparing", candidate="least_connections", in_place_of="round_robin"
        )
        httpx.post(url + "/v1/policy", json={"policy": "least_connections"})
        pilot.run()
        assert pilot.state.note == "somebody has made least_connections decide"


def test_requests_that_end_late_are_counted_when_the_next_pair_is_added(tmp_path, quick):
    with site(tmp_path) as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path)
        pilot.state = AutopilotState(
            step="comparing", candidate="least_connections", in_place_of="round_robin"
        )
        assert pilot._add_pair("least_connections")
        first = pilot.state.pairs[0]
        pilot.state = pilot.state.model_copy(
            update={"pairs": [first.model_copy(update={"gain": -9.0})]}
        )
        assert pilot._add_pair("least_connections")
        assert pilot.state.pairs[0] == first


def test_a_gateway_that_is_away_and_a_disk_that_is_full_are_waited_for(
    tmp_path, quick, monkeypatch
):
    monkeypatch.setattr(command, "_RETRY_S", 0.1)
    with site(tmp_path) as url:
        until_logged(tmp_path)
        pilot = an_autopilot(url, tmp_path, once=False, every_h=1e-9)
        failures = iter([GatewayError("GET /v1/autopilot: refused"), OSError(28, "No space left")])
        said, real = [], pilot._go_on

        def go_on(step, note, **changes):
            failure = next(failures, None)
            if failure is not None:
                raise failure
            if step == "comparing":
                raise KeyboardInterrupt
            real(step, note, **changes)

        monkeypatch.setattr(pilot, "_go_on", go_on)
        monkeypatch.setattr(pilot, "_say", said.append)
        with pytest.raises(KeyboardInterrupt):
            pilot.run()
        assert ["refused" in said[0], "No space left" in said[1]] == [True, True]


def test_a_registry_that_is_down_costs_the_run_and_not_the_cycle(tmp_path, quick, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with site(tmp_path) as url:
        until_logged(tmp_path)
        away = f"http://127.0.0.1:{free_port()}"
        pilot = an_autopilot(url, tmp_path, registry=away)
        said = []
        pilot._say = said.append
        pilot.run()
        assert pilot.state.step == "watching"
        assert any(away in sentence and "has no run" in sentence for sentence in said)
