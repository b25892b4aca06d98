"""The profile of an endpoint: declared, published, estimated."""

import asyncio
import logging
import math

import numpy as np
import pytest
from unit.serve.test_serve_external import BODY, PROFILE, run

from serve_app import app
from serve_app.cluster import Cluster, EngineProfile, ExternalPool
from serve_app.gateway.endpoint_speed import EndpointSpeed
from serve_app.gateway.replicas import InFlight
from tokenyard.perf.online import GENERIC_ITERATION, PoolEstimator
from tokenyard.routing.fleet import ReplicaConfig
from tokenyard.routing.snapshot_table import NUM_STATE

URL = "http://10.0.0.5:8000"
TERMS = ("iteration_s", "prefill_token_s", "sequence_s", "kv_token_s")


def a_pool(**fields):
    known = {"name": "theirs", "kind": "external", "model": "m", "endpoints": [URL]}
    return ExternalPool.model_validate(known | fields)


def a_speed(**fields):
    pool = a_pool(**fields)
    declared = None if pool.profile is None else pool.profile.iteration
    estimators = PoolEstimator(declared)
    return EndpointSpeed.of_endpoint(URL, pool, estimators), estimators


def times_of(profile):
    return [getattr(profile, term) for term in TERMS]


def see(speed, estimators, iteration, number=200):
    rng = np.random.default_rng(0)
    for _ in range(number):
        running = rng.uniform(1, 30)
        batch = np.array([10, rng.integers(3) * 300, 10 * running, 10 * running * 500])
        speed.meter.estimator.observe(float(iteration @ batch), *batch)
    estimators.share()
    speed.estimate()
    return speed.profile


def test_urls_are_enough_and_what_is_known_of_the_hardware_helps():
    assert times_of(a_pool().prior) == pytest.approx(GENERIC_ITERATION)
    hardware = {"gpu": "h100_sxm", "llm": "llama3_8b"}
    known = ReplicaConfig(name="x", gpu="h100_sxm", model="llama3_8b")
    prior = a_pool(hardware=hardware).prior
    assert times_of(prior) == pytest.approx(known.iteration)
    assert prior.kv_capacity_tokens == known.kv_capacity_tokens
    with pytest.raises(ValueError, match="give profile or hardware, not both"):
        a_pool(hardware=hardware, profile=PROFILE)
    with pytest.raises(ValueError, match="h1000"):
        a_pool(hardware=hardware | {"gpu": "h1000"})


def test_what_is_declared_holds_until_answers_are_seen_and_its_sizes_after_that():
    speed, estimators = a_speed(profile=PROFILE)
    assert speed.estimate() == {}
    assert speed.profile.source == "declared"
    assert times_of(speed.profile)[:2] == [0.01, 1e-5]
    truth = np.array([0.03, 1e-4, 1e-3, 1e-6])
    profile = see(speed, estimators, truth)
    assert (profile.source, profile.max_batch) == ("estimated", 8)
    assert times_of(profile)[0] == pytest.approx(truth[0], rel=0.2)
    # What an endpoint publishes changes sizes, and no times.
    assert speed.publish(64, 9_000.0) == profile
    speed, estimators = a_speed()
    see(speed, estimators, truth)
    published = speed.publish(64, 9_000.0)
    assert (published.max_batch, published.kv_capacity_tokens) == (64, 9_000.0)
    assert times_of(published) == times_of(speed.profile)
    assert speed.estimate() == {}, "nothing has changed"


def test_what_a_replica_of_ours_declares_holds_until_its_answers_say_otherwise():
    declared = EngineProfile(**PROFILE | {"kv_capacity_tokens": 9e3})
    estimators = PoolEstimator(declared.iteration)
    speed = EndpointSpeed.of_replica("a", "ours", declared, estimators)
    assert speed.estimate() == {}
    assert see(speed, estimators, 3 * declared.iteration).source == "estimated"
    assert speed.profile.iteration_s == pytest.approx(3 * declared.iteration_s, rel=0.2)
    assert speed.profile.kv_capacity_tokens == 9e3
    assert "times slower than declared" in speed.describe()["contradiction"]
    # Where nothing is declared, all is learned, of the others first.
    unknown = declared.model_copy(update={"source": "estimated"})
    newcomer = EndpointSpeed.of_replica("b", "ours", unknown, estimators)
    assert newcomer.profile.iteration_s > 2 * declared.iteration_s
    assert newcomer.describe()["contradiction"] is None


def test_a_declared_speed_that_is_far_off_is_said_once(caplog):
    caplog.set_level(logging.WARNING)
    speed, estimators = a_speed(profile=PROFILE)
    declared = speed.profile.iteration
    see(speed, estimators, 1.3 * declared)
    assert speed.describe()["contradiction"] is None
    for _ in range(3):
        see(speed, estimators, 6 * declared)
    text = "times slower than declared"
    assert text in speed.describe()["contradiction"]
    assert [text in line for line in caplog.messages] == [True]
    assert URL in caplog.messages[0]
    faster, estimators = a_speed(profile=PROFILE)
    see(faster, estimators, declared / 6)
    assert "times faster" in faster.describe()["contradiction"]


def test_a_batch_limit_and_others_requests_are_read_from_what_is_published():
    speed, _ = a_speed()
    for _ in range(20):
        speed.compare(waiting=4, running=16, kv_used=0.5, num_own=10)
    assert speed.publish(None, None).max_batch == 16
    assert speed.meter.times_own == pytest.approx(2.0, rel=0.1)
    full, _ = a_speed()
    for _ in range(20):
        full.compare(waiting=4, running=16, kv_used=0.95, num_own=20)
    assert full.publish(None, None).max_batch == 256
    assert full.meter.times_own == 1.0


def test_requests_in_flight_are_metered_and_nothing_is_kept_of_them():
    speed, _ = a_speed()
    held = InFlight([0.0] * NUM_STATE)
    held.meter = speed.meter
    for number in range(300):
        held.send(str(number), 10.0, 5.0, 0.0, 10, context_tokens=10.0)
        held.receive(str(number), 1 + number % 3, is_whole=number % 2 == 0)
        held.close(str(number), 1.0)
    held.close("unknown", 1.0)
    assert not speed.meter._sent
    assert len(speed.meter._equations) <= 64
    speed.meter.settle()
    assert all(map(math.isfinite, speed.meter.estimator.iteration))


def test_pools_show_what_is_estimated():
    async def test(client, gateway, endpoints):
        for _ in range(6):
            await client.post("/v1/completions", json=BODY)
        gateway.backends["theirs"].learn()
        (shown,) = (await client.get("/v1/pools")).json()["replicas"]
        assert shown["estimate"]["num_observations"] >= 1
        assert set(TERMS) <= set(shown["estimate"])
        assert set(shown["estimate"]["log_deviations"]) == set(TERMS)
        assert shown["profile"]["source"] == "estimated"
        assert shown["estimate"]["residual_fraction"] > 0
        console = (await client.get("/v1/console")).json()
        row = dict(zip(console["columns"], console["replicas"][0], strict=True))
        assert row["measured_ms"] > 0
        assert row["believed_ms"] > 0
        await asyncio.sleep(0)

    run(test, 1)


def test_a_gateway_that_comes_back_knows_how_fast_its_endpoints_are(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "hold_port", lambda host, port: None)
    monkeypatch.setattr(app.interpreter, "settle", lambda: None)
    options = app.GatewayOptions(state=tmp_path / "state.json")
    cluster = Cluster(name="c", description="d", served_model="m", pools=[a_pool()])

    async def life(learn):
        replica = app.GatewayReplica(cluster, options, {})
        estimator = replica._pools["theirs"].estimator.add(URL)
        if learn:
            for _ in range(100):
                estimator.observe(0.5, 10, 0, 100, 100_000)
        await replica._gateway.manager.store.save()
        replica._gateway.manager.stop()
        return estimator

    before, after = (asyncio.run(life(learn)) for learn in (True, False))
    assert after.num_observations == before.num_observations == 100
    batch = np.array([10, 0, 100, 100_000])
    assert after.iteration @ batch == pytest.approx(before.iteration @ batch, rel=0.02)
    assert after.iteration @ batch == pytest.approx(0.5, rel=0.05)
