"""Columns say what objects say: of replicas, of candidates, of ties, and to every policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import object_table
from oracle.object_table import ObjectTable
from sizes import scaled

from serve_app.cluster import EngineProfile
from serve_app.engines.base import EngineStatus
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.policy.ties import least_recently_used
from tokenyard.routing import observation as ob
from tokenyard.routing.artifact import learned_policy
from tokenyard.routing.policies import BASELINES, PolicyContext, make_policy
from tokenyard.routing.policies.delay import finish_times_s, mark_safe
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import champion_or_rule
from tokenyard.routing.types import Request, ScoringPolicy

MEANS = (100.0, 30.0)
SCENARIO = load_scenario("conversation_mixed_gpus")
RULES = sorted(set(BASELINES) - {"sed_reserve", "sed_dump", "sita"})
CHAMPIONS = ("conversation_mixed_gpus", "azure_code_slo", "two_classes_slo")


def a_profile(rng):
    return EngineProfile(
        iteration_s=float(rng.choice([0.01, 0.02])), prefill_token_s=1e-4, sequence_s=1e-4,
        kv_token_s=1e-7, max_batch=int(rng.integers(1, 6)), token_budget=64,
        kv_capacity_tokens=float(rng.choice([40.0, 1000.0])),
    )  # fmt: skip


class Both:
    """The same told to columns and to objects, at random."""

    def __init__(self, seed, num_replicas):
        self.rng = np.random.default_rng(seed)
        self.columns, self.objects = ReplicaTable(MEANS), ObjectTable(MEANS)
        self.now_s, self.open, self.num = 0.0, {}, 0
        for _ in range(num_replicas):
            self.add()

    def add(self):
        name, pool = f"r{self.num}", str(self.rng.choice(["p", "q"]))
        self.num += 1
        blocks = int(self.rng.choice([0, 4, 8]))
        profile = a_profile(self.rng)
        self.columns.add(name, pool, profile, blocks, self.now_s)
        self.objects.add(name, pool, profile, blocks, self.now_s)

    def drop(self):
        pool = str(self.rng.choice(["p", "q"]))
        names = [n for n, one in self.objects.replicas.items() if one.pool == pool]
        kept = {name for name in names if self.rng.random() < 0.7}
        if len(kept) + sum(one.pool != pool for one in self.objects.replicas.values()):
            self.columns.keep(pool, kept)
            self.objects.keep(pool, kept)

    def publish(self):
        name = self.any()
        status = EngineStatus(
            int(self.rng.integers(0, 3)), int(self.rng.integers(0, 6)), float(self.rng.random()),
            self.now_s - float(self.rng.choice([0.0, 0.5])), bool(self.rng.random() < 0.9),
            None if self.rng.random() < 0.8 else int(self.rng.integers(1, 6)),
        )  # fmt: skip
        self.columns.replicas[name].publish(status)
        self.objects.replicas[name].publish(status)

    def send(self):
        name, prompt, request_id = self.any(), self.prompt(), f"q{self.num}"
        self.num += 1
        match = self.objects.replicas[name].match_tokens(prompt)
        assert self.columns.replicas[name].match_tokens(prompt) == match
        output = float(self.rng.integers(1, 50))
        for table in (self.columns, self.objects):
            table.replicas[name].send(request_id, prompt, match, output, self.now_s)
        self.open[request_id] = name, self.columns.replicas[name], self.objects.replicas[name]

    def receive(self):
        for request_id, (_, ours, theirs) in self.open.items():
            if self.rng.random() < 0.5:
                num = int(self.rng.integers(0, 60))
                ours.in_flight.receive(request_id, num)
                theirs.receive(request_id, num)

    def close(self):
        for request_id in list(self.open):
            if self.rng.random() < 0.4:
                _, ours, theirs = self.open.pop(request_id)
                # The last news of an answer may come of a replica that is gone.
                status = EngineStatus(0, 1, 0.5, self.now_s, max_batch=int(self.rng.integers(1, 6)))
                ours.publish(status)
                theirs.publish(status)
                response_s = None if self.rng.random() < 0.3 else float(self.rng.random())
                ours.in_flight.close(request_id, self.now_s, response_s)
                theirs.close(request_id, self.now_s, response_s)

    def any(self):
        return str(self.rng.choice(sorted(self.objects.replicas)))

    def prompt(self):
        length, start = int(self.rng.integers(1, 40)), int(self.rng.integers(3))
        return Prompt([start, *range(length - 1)])

    def step(self):
        self.now_s += float(self.rng.choice([0.0, 0.25, 1.0]))
        what = self.rng.choice(["add", "drop", "publish", "send", "receive", "close"], p=STEPS)
        getattr(self, str(what))()

    def told(self):
        """The candidates of a prompt, as columns and as objects."""
        prompt, stale_after_s = self.prompt(), float(self.rng.choice([0.5, 2.0]))
        rows = self.columns.offered(self.now_s, stale_after_s)
        theirs = self.objects.offered(self.now_s, stale_after_s)
        ours = self.columns.snapshots(rows, prompt)
        return ours, [one.snapshot(one.match_tokens(prompt)) for one in theirs], theirs


STEPS = (0.05, 0.05, 0.25, 0.35, 0.15, 0.15)
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=scaled(60))
@given(SEEDS, st.integers(1, 40))
def test_columns_say_what_objects_say_whatever_happens(seed, num_replicas):
    both = Both(seed, num_replicas)
    for _ in range(60):
        both.step()
        ours, theirs, replicas = both.told()
        assert [repr(one) for one in ours] == [repr(one) for one in theirs]
        assert ours.last_sent_s.tolist() == [one.last_sent_s for one in replicas]
        assert ours.candidates.pools == tuple(one.pool for one in replicas)
        expected = ob.snapshot_columns(theirs)
        assert ob.snapshot_columns(ours).tobytes() == expected.tobytes()


@settings(max_examples=scaled(40))
@given(SEEDS, st.integers(1, 12))
def test_ties_are_broken_as_objects_break_them(seed, num_replicas):
    both = Both(seed, num_replicas)
    for _ in range(30):
        both.step()
        ours, theirs, _ = both.told()
        sent_s = both.rng.choice([-math.inf, 1.0, 2.0, 3.0], len(theirs)).tolist()
        for index in range(len(theirs)):
            expected = object_table.least_recently_used(theirs, index, sent_s)
            assert least_recently_used(ours, index, sent_s) == expected
            assert least_recently_used(theirs, index, sent_s) == expected


@settings(max_examples=scaled(30))
@given(SEEDS, st.integers(1, 12), st.sampled_from([0.5, 2.0, 20.0]))
def test_replicas_that_are_safe_to_explore_are_those_below_capacity_and_in_time(
    seed, num_replicas, slo_s
):
    both = Both(seed, num_replicas)
    for _ in range(20):
        both.step()
        ours, theirs, _ = both.told()
        request = Request(both.now_s, 30, 50.0)
        expected = [
            finish_s <= slo_s and one.num_outstanding < one.max_concurrency
            for one, finish_s in zip(theirs, finish_times_s(request, theirs), strict=True)
        ]
        num, safe = mark_safe(request, ours, slo_s)
        assert (num, safe.tolist()) == (sum(expected), expected)


def a_policy(name, num_replicas):
    if name in BASELINES:
        rng = np.random.default_rng(0)
        context = PolicyContext(SCENARIO.name, SCENARIO.slo, rng, num_replicas)
        return make_policy(name, context)
    return learned_policy(champion_or_rule(load_scenario(name))[0])


@pytest.mark.parametrize("name", [*RULES, *CHAMPIONS])
def test_every_policy_decides_the_same_on_columns_and_on_objects(name):
    both = Both(5, 7)
    on_columns, on_objects = a_policy(name, 7), a_policy(name, 7)
    for _ in range(scaled(60)):
        both.step()
        ours, theirs, _ = both.told()
        ours.release()  # Objects do not tell the prompts in flight, and then columns do not either.
        request = Request(both.now_s, 30, 50.0)
        if not isinstance(on_columns, ScoringPolicy):
            assert on_columns.route(request, ours) == on_objects.route(request, theirs)
            continue
        ours, theirs = on_columns.decide(request, ours), on_objects.decide(request, theirs)
        assert ours.replica == theirs.replica
        assert ours.scores.tobytes() == theirs.scores.tobytes()
