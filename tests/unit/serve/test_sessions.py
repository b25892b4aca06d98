"""Sessions at the gateway: who is let into KV memory, where, for how long, and who waits."""

import asyncio
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.serve.test_serve_gateway import PROFILE, FakePool
from unit.serve.test_serve_holding import a_site, num_held, until

from serve_app.cluster import SessionSettings
from serve_app.engines.base import EngineStatus
from serve_app.gateway import sessions
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.gateway.sessions import SessionGate
from tokenyard.routing.sessions.rules import make_rule

KV_TOKENS = 1000
RULE = "index_las:lease_s=5:growth_tokens=10:full_at=1"


class Site:
    """A gate before replicas of `KV_TOKENS` each."""

    def __init__(self, num_replicas=1, rule=RULE, share_of=None):
        self.table = ReplicaTable((100.0, 100.0))
        profile = PROFILE.model_copy(update={"kv_capacity_tokens": KV_TOKENS})
        for number in range(num_replicas):
            self.table.add(f"r{number}", "a", profile, 16, 0.0)
        self.gate = SessionGate(make_rule(rule), self.table, share_of)
        self.rows = self.table.offered(0.0, math.inf)

    def turn(self, name, tokens, now_s=0.0, tenant=""):
        return self.gate.arrive(name, tenant, Prompt(range(tokens)), now_s)

    def where(self, turn, now_s=0.0):
        """Replicas that a turn may go to."""
        rows = self.gate.admitted(turn, self.rows, now_s)
        return [self.table.at(row).replica_id for row in rows]

    def start(self, turn, replica_id="r0"):
        self.gate.start(turn, self.table.replicas[replica_id], 0.0)
        return turn

    def play(self, name, tokens, begins_s, ends_s, replica_id="r0", **more):
        """A turn from its arrival to its end, with an answer of 10 tokens."""
        turn = self.start(self.turn(name, tokens, begins_s, **more), replica_id)
        self.gate.end(turn, ends_s, 10)

    def taken(self):
        replicas = self.gate.describe(0.0)["replicas"]
        return {each["replica_id"]: each["session_tokens"] for each in replicas}


def test_a_session_has_its_room_until_its_lease_ends():
    site = Site()
    site.play("one", 600, 0.0, 10.0)
    other = site.turn("other", 500)
    assert site.where(other, 14.9) == [], "600 + 10 + 500 tokens and growth do not fit"
    assert site.where(site.turn("one", 990), 14.9) == ["r0"], "its own memory is kept for it"
    assert site.where(other, 15.0) == ["r0"]


def test_an_active_session_stays_on_its_replica_and_an_ended_lease_frees_it():
    site = Site(2)
    site.play("one", 300, 0.0, 1.0, "r1")
    assert site.where(site.turn("one", 320), 2.0) == ["r1"]
    assert site.where(site.turn("one", 320), 6.5) == ["r0", "r1"]
    site.table.keep("a", ["r0"])
    site.play("one", 300, 7.0, 8.0)
    site.rows = site.table.offered(0.0, math.inf)
    assert site.where(site.turn("one", 320), 9.0) == ["r0"], "a replica that is gone holds nobody"


def test_where_a_replica_is_empty_or_nothing_could_ever_fit_nobody_waits():
    site = Site()
    assert site.where(site.turn("large", 975)) == ["r0"], "it is empty"
    site.start(site.turn("small", 100))
    assert site.where(site.turn("too large", 990)) == ["r0"], "that is for the engine to say"


def test_memory_of_which_nobody_says_how_large_it_is_is_never_full(monkeypatch):
    site = Site()
    site.start(site.turn("one", 900))
    assert site.where(site.turn("other", 900)) == []
    monkeypatch.setattr(type(site.table.replicas["r0"]), "kv_tokens", math.inf)
    assert site.where(site.turn("other", 900)) == ["r0"]
    assert site.gate.describe(0.0)["replicas"][0]["kv_tokens"] is None


def test_what_others_use_of_the_memory_is_not_free():
    site = Site()
    site.table.replicas["r0"].publish(EngineStatus(0, 3, 0.7, 1.0))
    assert site.where(site.turn("one", 400), 1.0) == []
    assert site.where(site.turn("one", 280), 1.0) == ["r0"]


def test_who_was_held_as_long_as_may_be_takes_no_room_of_others():
    site = Site()
    site.start(site.turn("one", 900))
    late = site.turn("late", 500)
    assert site.where(late) == []
    late.is_admitted = True
    assert site.where(late) == ["r0"]
    before = site.taken()
    site.start(late)
    assert site.taken() == before


def test_begun_and_cached_sessions_go_first_and_then_those_with_least_work_done():
    site = Site()
    site.play("much", 400, 0.0, 1.0)
    site.play("little", 100, 0.0, 1.0)
    turns = [site.turn(name, 500, 100.0) for name in ("new", "much", "little")]
    order = sorted(turns, key=site.gate.order_key)
    assert [turn.session.name for turn in order] == ["little", "much", "new"]


def test_a_session_without_a_name_is_known_by_the_prompt_that_it_goes_on_from():
    site = Site()
    rng = np.random.default_rng(0)
    first, other = rng.integers(1, 1000, (2, 200)).tolist()

    def ask(prompt, tenant=""):
        return site.gate.arrive(None, tenant, Prompt(prompt), 0.0)

    turn = ask(first)
    site.start(turn)
    site.gate.end(turn, 1.0, 10)
    assert site.gate.num_sessions()["idle"] == 0, "whether it goes on nobody knows"
    again = ask(first + other)
    assert again.session is turn.session
    assert ask(other).session is not turn.session
    assert ask(first + other, "other tenant").session is not turn.session
    site.start(again)
    site.gate.end(again, 2.0, 10)
    assert site.gate.num_sessions()["idle"] == 1
    assert ask(first).session is not turn.session, "its prompt is longer now"


def test_a_session_that_was_forgotten_while_it_ran_can_go_on(monkeypatch):
    monkeypatch.setattr(sessions, "_MOST_SESSIONS", 1)
    site, prompt = Site(), list(range(100))
    turn = site.gate.arrive(None, "", Prompt(prompt), 0.0)
    site.start(turn)
    site.turn("newer", 10)
    site.gate.end(turn, 1.0, 10)
    assert site.gate.arrive(None, "", Prompt([*prompt, 7]), 2.0).session is turn.session
    assert site.where(site.turn("newer", 10, 3.0), 3.0) == ["r0"]


@pytest.mark.parametrize("share_of", [lambda tenant: 0.5, None])
def test_idle_sessions_of_a_tenant_beyond_its_share_give_way(share_of):
    site = Site(share_of=share_of)
    for number in range(4):
        site.play(f"forged {number}", 220, 0.0, 1.0 + number / 10, tenant="many")
    assert site.where(site.turn("one more", 220, tenant="many"), 2.0) == []
    assert site.where(site.turn("mine", 300, tenant="other"), 2.0) == ["r0"]
    left = [each["session"] for each in site.gate.describe(2.0)["sessions"]]
    assert left == ["forged 2", "forged 3"], "the oldest leases end, and no more than needed"
    assert site.where(site.turn("too much", 600, tenant="other"), 2.0) == [], "beyond its own share"


STEP = st.tuples(
    st.sampled_from("arrive end fail wait".split()), st.integers(0, 5), st.integers(1, 400),
    st.integers(0, 1),
)  # fmt: skip


@given(st.lists(STEP, max_size=60))
def test_what_sessions_take_is_what_their_turns_and_leases_do(steps):
    site, now_s, running, idle = Site(2), 0.0, [], {}
    limit = KV_TOKENS
    for what, who, tokens, place in steps:
        if what == "arrive":
            turn = site.turn(str(who), tokens, now_s)
            before = site.taken()
            was_active = turn.session in [each.session for each in running] or who in idle
            allowed = site.where(turn, now_s)
            if allowed:
                name = allowed[place % len(allowed)]
                fits = before[name] == 0 or before[name] + tokens + 10 <= limit
                assert was_active or fits
                site.start(turn, name)
                running.append(turn)
                idle.pop(who, None)
        elif running and what != "wait":
            turn = running.pop(place % len(running))
            name = turn.replica_id
            site.gate.end(turn, now_s, 10 if what == "end" else None)
            session = turn.session
            if what == "end" and session not in [each.session for each in running]:
                idle[int(session.name)] = (name, turn.prompt.num_tokens + 20, now_s + 5.0)
        else:
            now_s += place + 1.0
            idle = {who: lease for who, lease in idle.items() if lease[2] > now_s}
            site.where(site.turn("nobody", 1, now_s), now_s)
        taken = Counter({"r0": 0.0, "r1": 0.0})
        for turn in running:
            taken[turn.replica_id] += turn.prompt.num_tokens + 10
        for name, held, _ in idle.values():
            taken[name] += held
        assert site.taken() == pytest.approx(dict(taken))
    for turn in running:
        site.gate.end(turn, now_s, 10)
    site.where(site.turn("nobody", 1, now_s + 5.0), now_s + 5.0)
    assert site.taken() == {"r0": 0.0, "r1": 0.0}


class SmallPool(FakePool):
    """A pool whose replica holds 100 tokens."""

    def refresh(self, table, now_s):
        profile = PROFILE.model_copy(update={"kv_capacity_tokens": 100})
        table.add(self.replica_id, self.name, profile, 0, now_s).publish(
            EngineStatus(0, 0, 0.0, now_s)
        )


def run(test, rule, **options):
    async def inside():
        fields = {"sessions": {"rule": rule}, "queue": {"max_requests": 4}, "make": SmallPool}
        site = a_site(max_ongoing=100, **fields, **options)
        async with asyncio.timeout(60), site as (client, gateway, pools):
            await test(client, gateway, pools["a"])

    asyncio.run(inside())


def ask(client, session, prompt="h" * 60, tenant=None):
    headers = {"x-session-id": session} | ({"x-tenant": tenant} if tenant else {})
    body = {"model": "m", "prompt": prompt, "max_tokens": 5}
    return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))


async def hold_another(client, gateway, pool):
    """A session that takes the memory, and one that is held meanwhile."""
    pool.may_go_on.clear()
    first = ask(client, "one")
    await until(lambda: len(pool.requests) == 1)
    held = ask(client, "other")
    await until(lambda: num_held(gateway) == 1)
    return first, held


SMALL = "index_las:growth_tokens=0:full_at=1"


def test_a_turn_is_held_until_another_session_ends_its_lease():
    async def test(client, gateway, pool):
        first, held = await hold_another(client, gateway, pool)
        shown = (await client.get("/v1/sessions")).json()
        assert (shown["running"], shown["idle"], shown["held"]) == (1, 0, 1)
        assert shown["replicas"][0]["session_tokens"] == 60
        [waiting] = (await client.get("/v1/queue")).json()["requests"]
        assert waiting["session"] == "other"
        pool.may_go_on.set()
        assert {(await one).status_code for one in (first, held)} == {200}
        assert (num_held(gateway), gateway.in_flight) == (0, 0)
        await client.get("/metrics")
        value = gateway.metrics.registry.get_sample_value
        assert value("tokenyard_sessions", {"state": "running"}) == 0

    run(test, SMALL + ":lease_s=0.2")


def test_at_the_bound_a_begun_session_goes_on_and_a_new_one_gets_429():
    async def test(client, gateway, pool):
        assert (await ask(client, "begun", "h" * 30)).status_code == 200
        await asyncio.sleep(0.05)  # Its lease ends.
        pool.may_go_on.clear()
        first = ask(client, "one")
        await until(lambda: len(pool.requests) == 2)
        begun, new = ask(client, "begun"), ask(client, "new")
        refused = await new
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "no replica had room within 0.3 s" in refused.text
        await until(lambda: len(pool.requests) == 3)
        pool.may_go_on.set()
        assert {(await one).status_code for one in (first, begun)} == {200}
        assert gateway.sessions.describe(math.inf)["replicas"][0]["session_tokens"] == 0

    run(test, SMALL + ":lease_s=0.01:hold_s=0.3")


def test_a_tenant_fills_its_share_of_the_line_and_no_more():
    async def test(client, gateway, pool):
        pool.may_go_on.clear()
        first = ask(client, "one", tenant="many")
        await until(lambda: len(pool.requests) == 1)
        held = [ask(client, f"{number}", tenant="many") for number in range(3)]
        [refused], _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result().status_code == 429
        held = [*held, ask(client, "mine", tenant="other")]
        await until(lambda: num_held(gateway) == 3)
        pool.may_go_on.set()
        assert (await first).status_code == 200
        assert sorted([(await one).status_code for one in held]) == [200, 200, 200, 429]

    run(test, SMALL + ":lease_s=0.01", tenants={"many": {}, "other": {}})


def test_a_caller_who_leaves_while_it_waits_gives_its_place_up():
    async def test(client, gateway, pool):
        first, held = await hold_another(client, gateway, pool)
        held.cancel()
        await until(lambda: num_held(gateway) == 0)
        pool.may_go_on.set()
        assert (await first).status_code == 200
        assert gateway.sessions.num_sessions()["running"] == 0

    run(test, SMALL + ":lease_s=0.2")


def test_another_rule_holds_from_then_on():
    async def test(client, gateway, pool):
        first, held = await hold_another(client, gateway, pool)
        answer = await client.post("/v1/sessions", json={"rule": SMALL + ":full_at=9"})
        assert answer.status_code == 200
        await until(lambda: len(pool.requests) == 2)
        assert (await client.get("/v1/sessions")).json()["full_at"] == 9
        refused = await client.post("/v1/sessions", json={"rule": "thunderagent"})
        assert refused.status_code == 422
        pool.may_go_on.set()
        assert {(await one).status_code for one in (first, held)} == {200}

    run(test, SMALL + ":lease_s=0.2")


@pytest.mark.parametrize("name", ["x-session-id", "prompt_cache_key", "user"])
def test_callers_name_sessions_by_a_header_or_a_field(name):
    async def test(client, gateway, pool):
        body = {"model": "m", "prompt": "hello", "max_tokens": 5}
        headers = {name: "mine"} if name.startswith("x-") else {}
        body |= {} if headers else {name: "mine"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        [session] = gateway.sessions.describe(0.0)["sessions"]
        assert (session["session"], session["turns"]) == ("mine", 1)

    run(test, SMALL + ":lease_s=60")


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("index", "predicts no remaining work"),
        ("thunderagent", "has no ticks"),
        ("index_las:lease=3", "unknown number 'lease'"),
        ("sjf", "unknown session rule 'sjf'"),
    ],
)
def test_a_rule_that_needs_what_no_gateway_knows_is_refused(rule, why):
    with pytest.raises(ValueError, match=why):
        SessionSettings(rule=rule)
