"""Rates and quotas against slow oracles, and through the gateway."""

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.raw_endpoint import RawCaller
from unit.serve.test_bytes_through import BODY, CHAT, END, EVENTS, STREAM, WHOLE, a_delta
from unit.serve.test_bytes_through import a_site as a_gateway_site
from unit.serve.test_keys import ENTRIES, a_site, bearer, write
from unit.serve.test_serve_gateway import a_body

from serve_app.gateway.callers import ANYBODY, Caller, CallerLimits, KeyFile
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.rate_limits import Grant, OverLimit, RateLimits
from serve_app.http.auth import Access

MINUTE_NS = 60 * 10**9
DAY_S = 86_400


class Clocks:
    def __init__(self, unix_s=0.0):
        self.ns, self.unix_s = 0, unix_s

    def forward(self, ns):
        self.ns += ns
        self.unix_s += ns / 1e9

    def limits(self, limits):
        return RateLimits(lambda _: limits, lambda: self.ns, lambda: self.unix_s)


class Log:
    """The oracle: everything that was ever taken, with its time.

    A bucket that begins full holds so much that no stretch of time sees more taken than a minute's
    worth and what comes back in it.
    """

    def __init__(self, per_minute):
        self.per_minute, self.events = per_minute, []

    def level(self, now_ns):
        """What is there, in 60 billionths."""
        full = self.per_minute * MINUTE_NS
        levels, taken = [full], 0
        for time_ns, amount in reversed(self.events):
            taken += amount
            levels.append(full + (now_ns - time_ns) * self.per_minute - taken * MINUTE_NS)
        return min(levels)


GAPS_NS = st.one_of(
    st.integers(0, 10**6), st.integers(0, 3 * MINUTE_NS), st.sampled_from([0, 10**9, MINUTE_NS])
)


@settings(max_examples=scaled(1000), deadline=None)
@given(st.integers(1, 9), st.lists(GAPS_NS, max_size=60))
def test_requests_are_let_in_as_the_list_of_all_times_allows(per_minute, gaps_ns):
    clocks, oracle = Clocks(), Log(per_minute)
    limits = clocks.limits(CallerLimits(requests_per_minute=per_minute))
    for gap_ns in gaps_ns:
        clocks.forward(gap_ns)
        level = oracle.level(clocks.ns)
        found = limits.admit(Caller("t", "k"), 5)
        assert isinstance(found, Grant) == (level >= MINUTE_NS)
        if isinstance(found, Grant):
            oracle.events.append((clocks.ns, 1))
        else:
            missing = MINUTE_NS - level
            assert found.retry_after_s == -(-missing // (per_minute * 10**9))


STEPS = st.lists(st.tuples(GAPS_NS, st.integers(0, 40), st.integers(0, 60)), max_size=40)


@settings(max_examples=scaled(1000), deadline=None)
@given(st.integers(1, 50), STEPS)
def test_tokens_are_reserved_and_settled_as_the_list_of_all_times_says(per_minute, steps):
    clocks, oracle, open_ = Clocks(), Log(per_minute), []
    limits = clocks.limits(CallerLimits(tokens_per_minute=per_minute))
    for gap_ns, asked, used in steps:
        clocks.forward(gap_ns)
        found = limits.admit(Caller("t", "k"), asked)
        fits = oracle.level(clocks.ns) >= asked * MINUTE_NS
        assert isinstance(found, Grant) == fits
        if fits:
            oracle.events.append((clocks.ns, asked))
            remaining = dict(found.headers)[b"x-ratelimit-remaining-tokens"]
            assert int(remaining) == max(oracle.level(clocks.ns) // MINUTE_NS, 0)
            open_.append((found, asked))
        elif open_:
            grant, reserved = open_.pop(0)
            grant.settle(used)
            oracle.events.append((clocks.ns, used - reserved))


DAYS = st.lists(st.tuples(st.integers(0, DAY_S), st.integers(0, 30), st.booleans()), max_size=40)


@settings(max_examples=scaled(500), deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), DAYS)
def test_a_quota_holds_for_each_day_of_utc_and_refuses_nothing_that_fits(quota, most, steps):
    clocks, tokens, requests = Clocks(), Counter(), Counter()
    limits = clocks.limits(CallerLimits(tokens_per_day=quota, requests_per_day=most))
    for gap_s, asked, is_cancelled in steps:
        clocks.forward(gap_s * 10**9)
        day = int(clocks.unix_s) // DAY_S
        found = limits.admit(Caller("t", "k"), asked)
        fits = tokens[day] + asked <= quota and requests[day] < most
        assert isinstance(found, Grant) == fits
        if not fits:
            assert found.code == "insufficient_quota"
            assert found.retry_after_s == DAY_S - int(clocks.unix_s) % DAY_S
        elif is_cancelled:
            found.cancel()
        else:
            found.settle(asked // 2)
            tokens[day] += asked // 2
            requests[day] += 1


def test_what_is_given_back_the_next_day_is_yesterdays():
    clocks = Clocks(DAY_S - 1.0)
    limits, caller = clocks.limits(CallerLimits(tokens_per_day=10)), Caller("t", "k")
    first = limits.admit(caller, 10)
    clocks.forward(2 * 10**9)
    assert isinstance(limits.admit(caller, 6), Grant)
    first.settle(0)
    assert isinstance(limits.admit(caller, 5), OverLimit)
    assert isinstance(limits.admit(caller, 4), Grant)


@pytest.mark.parametrize("back_s", [1, 3600])
def test_a_clock_that_is_set_back_over_midnight_gives_no_second_quota(back_s):
    clocks = Clocks(DAY_S + 1.0)
    limits, caller = clocks.limits(CallerLimits(requests_per_day=1)), Caller("t", "k")
    assert isinstance(limits.admit(caller, 1), Grant)
    clocks.unix_s -= back_s + 1
    assert isinstance(limits.admit(caller, 1), OverLimit)
    clocks.unix_s += back_s + 1
    assert isinstance(limits.admit(caller, 1), OverLimit)


def test_addresses_are_counted_apart_and_networks_of_ipv6_together():
    limits = Clocks().limits(CallerLimits(requests_per_minute=1))

    def may(address):
        return isinstance(limits.admit(Caller(address=address), 1), Grant)

    assert may("10.0.0.1")
    assert may("10.0.0.2")
    assert not may("10.0.0.1")
    assert not may("::ffff:10.0.0.1")
    assert may("2001:db8::1")
    assert not may("2001:db8::ffff:2")
    assert may("2001:db8:0:1::1")


def test_addresses_that_are_known_are_few(monkeypatch):
    monkeypatch.setattr("serve_app.gateway.rate_limits._MAX_ADDRESSES", 3)
    limits = Clocks().limits(CallerLimits(requests_per_minute=1))
    for last in (1, 2, 3, 1, 4):
        limits.admit(Caller(address=f"10.0.0.{last}"), 1)
    assert list(limits._by_address) == ["10.0.0.3", "10.0.0.1", "10.0.0.4"]


def test_what_was_used_survives_a_restart_and_comes_back_meanwhile():
    clocks, caller = Clocks(5 * DAY_S), Caller("t", "k")
    of = CallerLimits(requests_per_minute=60, tokens_per_day=100)
    before = clocks.limits(of)
    for _ in range(60):
        assert isinstance(before.admit(caller, 1), Grant)
    saved = json.loads(json.dumps(before.saved()))
    clocks.unix_s += 2.0
    clocks.ns = 7  # Another process, whose clock begins elsewhere.
    after = clocks.limits(of)
    after.restore(saved)
    assert after.saved()["keys"]["k"]["tokens"][2] == 60
    found = [isinstance(after.admit(caller, 20), Grant) for _ in range(3)]
    assert found == [True, True, False]
    assert after.admit(caller, 0).code == "rate_limit_exceeded"


def test_other_limits_hold_at_once_and_what_was_used_was_used():
    clocks, caller = Clocks(), Caller("t", "k")
    known = [CallerLimits(requests_per_minute=10, tokens_per_day=100)]
    limits = RateLimits(lambda _: known[0], lambda: clocks.ns, lambda: clocks.unix_s)
    grants = [limits.admit(caller, 10) for _ in range(5)]
    known[0] = CallerLimits(requests_per_minute=6, tokens_per_day=60)
    assert isinstance(limits.admit(caller, 10), Grant)
    assert limits.admit(caller, 10).code == "insufficient_quota"
    for one in grants:
        one.settle(0)
    assert isinstance(limits.admit(caller, 50), Grant)
    known[0] = CallerLimits(tokens_per_day=60)
    assert isinstance(limits.admit(caller, 0), Grant)
    assert limits.admit(ANYBODY, 10**9) is None


# Through the gateway.


def an_entry(**limits):
    return [ENTRIES[0] | {"limits": limits}]


def run(path, test):
    async def inside():
        async with asyncio.timeout(30), a_site(path) as (client, file, gateway, pools):

            async def ask(**fields):
                body = a_body(**fields)
                return await client.post("/v1/completions", json=body, headers=bearer("sk-ann"))

            await test(ask, client, gateway, pools, file)

    asyncio.run(inside())


def test_a_rate_is_exact_and_answers_say_what_remains(tmp_path):
    write(tmp_path / "keys.yaml", an_entry(requests_per_minute=3))

    async def test(ask, client, gateway, pools, file):
        gateway.limits._clock_ns = lambda: 10**18
        answers = [await ask() for _ in range(5)]
        assert [one.status_code for one in answers] == [200, 200, 200, 429, 429]
        named = {key: value for key, value in answers[0].headers.items() if "ratelimit" in key}
        assert named == {
            "x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "2",
            "x-ratelimit-reset-requests": "20s",
        }  # fmt: skip
        last = answers[-1]
        assert last.headers["retry-after"] == "20"
        assert last.headers["x-ratelimit-remaining-requests"] == "0"
        assert last.headers["x-ratelimit-reset-requests"] == "1m0s"
        error = last.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert error["message"].startswith("rate limit reached: 0 of 3 requests per minute")
        assert gateway.in_flight == 0
        value = gateway.metrics.registry.get_sample_value
        assert value("tokenyard_refused_total", {"reason": "rate limit exceeded"}) == 2

    run(tmp_path / "keys.yaml", test)


def test_tokens_are_reserved_by_the_longest_answer_and_settled_by_what_came(tmp_path):
    write(tmp_path / "keys.yaml", an_entry(tokens_per_day=30))

    async def test(ask, client, gateway, pools, file):
        # 5 + 20 are reserved, 5 + 2 used.
        first = await ask(max_tokens=20, stream=True)
        assert first.headers["x-ratelimit-remaining-tokens"] == "5"
        assert gateway.limits._by_key["ann"].tokens._used == 7
        refused = await ask(max_tokens=19)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert "23 of 30 tokens are left for today, 24 are asked" in refused.text
        assert (await ask(max_tokens=18)).status_code == 200

    run(tmp_path / "keys.yaml", test)


def test_what_the_gateway_has_no_room_for_is_not_counted(tmp_path):
    write(tmp_path / "keys.yaml", an_entry(requests_per_day=1, tokens_per_day=13))

    async def test(ask, client, gateway, pools, file):
        for pool in pools.values():
            pool.script.append((0, ReplicaFull("it is full")))
        full = await ask()
        assert (full.status_code, full.json()["error"]["code"]) == (429, None)
        assert (await ask()).status_code == 200
        assert (await ask()).json()["error"]["type"] == "insufficient_quota"

    run(tmp_path / "keys.yaml", test)


def test_a_request_that_never_fits_says_so(tmp_path):
    write(tmp_path / "keys.yaml", an_entry(tokens_per_minute=10))

    async def test(ask, client, gateway, pools, file):
        refused = await ask(max_tokens=8)
        assert "13 tokens are asked at once, more than 10" in refused.text
        assert (await ask(max_tokens=5)).status_code == 200

    run(tmp_path / "keys.yaml", test)


def test_callers_without_a_key_have_the_limits_of_their_address(tmp_path):
    write(tmp_path / "keys.yaml", ENTRIES, without_key={"requests_per_minute": 2})

    async def test(ask, client, gateway, pools, file):
        statuses = [(await client.post("/v1/completions", json=a_body())).status_code
                    for _ in range(3)]  # fmt: skip
        assert statuses == [200, 200, 429]
        assert (await ask()).status_code == 200

    run(tmp_path / "keys.yaml", test)


def test_a_key_that_is_gone_since_its_head_was_read_has_to_come_back(tmp_path):
    write(tmp_path / "keys.yaml", an_entry(requests_per_minute=5))

    async def test(ask, client, gateway, pools, file):
        gateway.limits._limits_of = Access(None, keys=KeyFile(tmp_path / "none")).limits_of
        refused = await ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")

    run(tmp_path / "keys.yaml", test)


@pytest.mark.parametrize("stream", [False, True])
def test_who_asks_at_the_same_time_is_counted_exactly(tmp_path, stream):
    write(tmp_path / "keys.yaml", an_entry(requests_per_minute=7, tokens_per_minute=10_000))
    keys = KeyFile(tmp_path / "keys.yaml")
    keys.open()
    sign = b"authorization: Bearer sk-ann\r\n"

    async def test(port, gateway, endpoints):
        gateway.limits = RateLimits(Access(None, keys=keys).limits_of, lambda: 10**18)
        (endpoint,) = endpoints
        endpoint.pieces = [a_delta(content="a"), *END] if stream else [WHOLE]
        if stream:
            endpoint.headers, endpoint.framing = EVENTS, "chunked"

        async def ask():
            async with RawCaller.to(port) as caller:
                return await caller.ask(CHAT, STREAM if stream else BODY, sign)

        answers = await asyncio.gather(*(ask() for _ in range(12)))
        assert Counter(status for status, *_ in answers) == {200: 7, 429: 5}
        remaining = [headers[b"x-ratelimit-remaining-requests"] for _, headers, _ in answers]
        assert sorted(remaining) == sorted([b"0"] * 5 + [b"%d" % n for n in range(7)])
        refused = next(body for status, _, body in answers if status == 429)
        assert json.loads(refused)["error"]["code"] == "rate_limit_exceeded"
        assert gateway.in_flight == 0
        used = gateway.metrics.registry.get_sample_value
        tokens = [used(f"tokenyard_{one}_tokens_total", {"pool": "theirs"})
                  for one in ("prompt", "output")]  # fmt: skip
        assert gateway.limits._by_key["ann"].tokens._used == sum(tokens) > 7

    async def inside():
        async with asyncio.timeout(60), a_gateway_site(tokens=(None, None, False, keys)) as site:
            await test(*site)

    asyncio.run(inside())
