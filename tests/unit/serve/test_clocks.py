"""Ages are told by our clock alone, whatever those of the replicas say."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.engine_site import SECRET, run
from unit.raw_endpoint import RawCaller
from unit.serve.test_serve_gateway import OWN, PROFILE, cluster_of

from serve_app.engines.base import EngineStatus
from serve_app.gateway.backends import ServeBackend
from serve_app.gateway.clocks import DELIVERY_S, RemoteClock, steady_unix_s
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.gateway.router_registry import ROUTERS

STALE_AFTER_S = 5.0
PERIOD_S = 0.25


class SkewedReplica:
    """What Serve's router is told of a replica whose clock is wrong."""

    def __init__(self, skew_s):
        self.skew_s = skew_s
        pool = {"name": "skewed", "kind": "own", "config": OWN | {"max_model_tokens": 500}}
        (pool,) = cluster_of(pools=[pool]).own_pools
        self.router = ROUTERS["app", "skewed"] = SimpleNamespace(live=(), version=0)
        handle = SimpleNamespace(app_name="app", options=lambda **_: None)
        self.backend = ServeBackend(pool, handle)
        self.table = ReplicaTable((100.0, 10.0))

    def publish(self, sent_s, received_s, num_waiting=0):
        stats = {
            "num_waiting": num_waiting, "num_running": 0, "kv_used_fraction": 0.0,
            "observed_at_s": sent_s + self.skew_s,
        }  # fmt: skip
        told = {"profile": PROFILE.model_dump(), "url": "http://127.0.0.1:9", "secret": SECRET}
        name = SimpleNamespace(unique_id="replica")
        self.router.live = (
            SimpleNamespace(replica_id=name, replica_metadata=told, routing_stats=stats),
        )
        self.router.version += 1
        self.backend.refresh(self.table, received_s)

    def age_s(self, now_s):
        return now_s - self.table.replicas["replica"].status.observed_at_s

    def is_stale(self, now_s):
        rows = self.table.offered(now_s, STALE_AFTER_S)
        return now_s - self.table.snapshots(rows, Prompt([0])).observed_at_s[0] > STALE_AFTER_S

    def publish_for(self, begin_s, duration_s, delay_s=0.05):
        for number in range(round(duration_s / PERIOD_S)):
            sent_s = begin_s + number * PERIOD_S
            self.publish(sent_s, sent_s + delay_s, num_waiting=number)
        return sent_s + delay_s


@pytest.fixture
def replica():
    yield SkewedReplica
    ROUTERS.pop(("app", "skewed"), None)


@pytest.mark.parametrize("skew_s", [-3600.0, -6.0, -5.0, -0.1, 0.0, 0.1, 5.0, 6.0, 3600.0])
def test_a_wrong_clock_makes_no_replica_stale_and_none_fresh_that_is_dead(replica, skew_s):
    one = replica(skew_s)
    now_s = one.publish_for(1000.0, 10.0)
    assert one.table.replicas["replica"].status.num_waiting == 39
    assert -1e-9 <= one.age_s(now_s) <= DELIVERY_S + 0.05
    assert not one.is_stale(now_s + STALE_AFTER_S - 2 * DELIVERY_S)
    assert one.is_stale(now_s + STALE_AFTER_S + 0.05)


@pytest.mark.parametrize("step_s", [-3600.0, -5.0, 5.0, 3600.0])
def test_a_clock_that_is_set_makes_no_replica_stale(replica, step_s):
    one = replica(0.0)
    one.publish_for(1000.0, 10.0)
    one.skew_s = step_s
    now_s = one.publish_for(1010.0, 2.0)
    assert one.table.replicas["replica"].status.num_waiting == 7
    assert one.age_s(now_s) <= DELIVERY_S + 0.05
    assert one.is_stale(now_s + STALE_AFTER_S + 0.05)


def test_of_clocks_that_are_right_nothing_is_changed(replica):
    one = replica(0.0)
    now_s = one.publish_for(1000.0, 10.0, delay_s=0.2)
    assert one.age_s(now_s) == pytest.approx(0.2)


def test_a_message_that_is_late_is_old(replica):
    one = replica(7.0)
    one.publish_for(1000.0, 10.0)
    one.publish(1010.0, 1014.0)
    assert one.age_s(1014.0) == pytest.approx(4.0 - 0.05)


def test_a_replica_that_is_gone_is_forgotten_with_its_clock(replica):
    one = replica(5.0)
    one.publish_for(1000.0, 1.0)
    one.router.live, one.router.version = (), one.router.version + 1
    one.backend.refresh(one.table, 1002.0)
    one.skew_s = 0.0
    now_s = one.publish_for(1003.0, 1.0)
    assert one.age_s(now_s) <= DELIVERY_S


@pytest.mark.parametrize("skew_s", [-3600.0, -6.0, 0.0, 6.0, 3600.0])
def test_what_a_replica_tells_with_an_answer_is_no_newer_than_the_answer(skew_s):
    """Else all that it publishes until its clock is reached is ignored, also that it drains."""

    async def test(port, gateway, sites):
        (site,) = sites
        status = site.texts.status

        def skewed():
            now = status()
            return replace(now, observed_at_s=now.observed_at_s + skew_s)

        def tell(**stats):
            told = site.as_ray_tells
            told.routing_stats = {
                "num_running": 0, "kv_used_fraction": 0.0, "observed_at_s": time.time() + skew_s,
                **stats,
            }  # fmt: skip
            router = ROUTERS["app", "ours"]
            router.live, router.version = (told,), router.version + 1
            gateway.refresh()

        site.texts.status = skewed
        tell(num_waiting=0)
        replica = gateway.table.replicas[site.replica_id]
        replica.status = replace(replica.status, observed_at_s=gateway.clock_s() - 2.0)
        async with RawCaller.to(port) as caller:
            body = b'{"model": "m", "prompt": "ab", "max_tokens": 3}'
            assert (await caller.ask(b"/v1/completions", body))[0] == 200
        assert replica.status.max_batch is not None  # As only answers tell it here.
        assert gateway.clock_s() - 5.0 < replica.status.observed_at_s <= gateway.clock_s()
        tell(num_waiting=9)
        assert replica.status.num_waiting == 9

    run(test)


def test_before_anything_is_known_of_a_clock_an_answer_is_of_now(replica):
    one = replica(0.0)
    told = EngineStatus(1, 0, 0.0, 1e9)
    assert one.backend.by_our_clock("unknown", told, 1000.0) == replace(told, observed_at_s=1000.0)


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0.01, 600.0), st.floats(0.0, 10.0)), min_size=1, max_size=40),
)
def test_no_time_is_later_than_it_was_received_or_earlier_than_the_slowest_way(skew_s, messages):
    clock, sent_s, received_s, slowest_s = RemoteClock(), 1e6, -math.inf, 0.0
    for gap_s, delay_s in messages:
        sent_s += gap_s
        # Messages of one replica do not overtake each other.
        received_s = max(sent_s + delay_s, received_s)
        slowest_s = max(slowest_s, received_s - sent_s)
        ours_s = clock.to_ours(sent_s + skew_s, received_s)
        assert received_s - slowest_s - DELIVERY_S - 1e-6 <= ours_s <= received_s + 1e-6


def test_our_own_clock_goes_on_when_it_is_set(monkeypatch):
    before_s = steady_unix_s()
    assert before_s == pytest.approx(time.time(), abs=5.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before_s <= steady_unix_s() <= before_s + 5.0
