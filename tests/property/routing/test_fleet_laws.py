"""Laws of replicas that batch continuously; docs/invariants.md lists them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.engine_instances import engines, jobs
from oracle.fleet_instances import SECOND, Ask, a_fleet, a_sim, a_stream, step
from oracle.slow_engine import Change
from sizes import scaled

from tokenyard.routing import observation as ob
from tokenyard.routing.evaluation import summarise
from tokenyard.routing.fleet import TrafficClass
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.types import OrderKey

few = settings(max_examples=scaled(60))
seeds = st.integers(0, 2**32 - 1)
PRIORITIES = (TrafficClass(name="a"), TrafficClass(name="b", priority=1))
NUM = 3
"""Replicas."""


@st.composite
def fleets(draw, num_routers=1, scrape_interval_s=0.0, churns=True):
    """Draw a fleet with a stream and what befalls its replicas."""
    engine = draw(engines())
    # A replica that is not busy comes up warm, so that the law of work holds at every instant.
    engine = dataclasses.replace(engine, queue_limit=max(engine.queue_limit, 1), warm_up_factor=1)
    asks = [
        Ask(**dataclasses.asdict(job), router=draw(st.integers(0, num_routers - 1)))
        for job in draw(jobs())
    ]
    changes = []
    for replica in draw(st.lists(st.integers(0, NUM - 1), unique=True)) if churns else []:
        # Never at the instant of a scrape, which comes before the changes of that instant.
        fails_s, down_s = draw(st.integers(0, 40)) / 4 + 1 / 8, draw(st.integers(1, 40)) / 4
        if draw(st.booleans()):
            changes.append(Change(fails_s / 2, replica, "drain"))
        changes += [
            Change(fails_s, replica, "fail"), Change(fails_s + down_s, replica, "join")
        ]  # fmt: skip
    scenario = a_fleet(
        [engine] * NUM, classes=PRIORITIES, num_routers=num_routers,
        scrape_interval_s=scrape_interval_s, max_retries=2, retry_delay_s=0.25,
    )  # fmt: skip
    changes.sort(key=lambda change: change.at_s)
    return scenario, engine, asks, tuple(changes)


def loaded(instance, num_copies=1):
    scenario, engine, asks, changes = instance
    sim = a_sim(scenario, [engine] * NUM, len(asks), num_copies)
    for copy in range(num_copies):
        sim.load(copy, a_stream(asks, changes))
    return sim


def decisions(sim, seed):
    """Place at random to the end, stopping before every placement and once at the end."""
    rng = np.random.default_rng(seed)
    while sim.view().current() >= 0:
        yield sim
        sim.step(rng.integers(0, NUM, len(sim.rewards)))
    sim.drain()
    yield sim


def held(sim, copy=0):
    columns = [lay.DECODING, lay.PREFILLING, lay.WAITING]
    return sim.arrays.state[copy][:, columns].sum(axis=1)


def sequences(sim, replica, at, count, fields):
    first = int(sim.arrays.rules[at])
    number = int(sim.arrays.state[0, replica, count])
    return sim.arrays.state[0, replica, first : first + number * fields].reshape(number, fields)


def pages_in_use(sim, replica):
    """Pages of what runs beside its cached blocks: those of the token in the making included."""
    page, block = sim.arrays.rules[[lay.PAGE_TOKENS, lay.BLOCK_TOKENS]]
    decode = sequences(sim, replica, lay.DECODE_AT, lay.DECODING, lay.DECODE_FIELDS)
    prefill = sequences(sim, replica, lay.PREFILL_AT, lay.PREFILLING, lay.PREFILL_FIELDS)
    step = sim.arrays.state[0, replica, lay.STEP]
    tokens = [
        *(decode[:, lay.D_BASE] + step + 1),
        *(prefill[:, lay.P_TO_PREFILL] + prefill[:, lay.P_KV]),
    ]
    blocks = decode[:, lay.D_HELD].sum() + prefill[:, lay.P_HELD].sum()
    return sum(math.ceil(one / page) for one in tokens) - blocks * block / page


@few
@given(instance=fleets(), seed=seeds)
def test_every_request_is_somewhere_and_the_clock_never_goes_back(instance, seed):
    clock_s = -math.inf
    for sim in decisions(loaded(instance), seed):
        found = sim.view().outcomes()
        offered = int(sim.arrays.clock[0, lay.NEXT])
        waits_to_be_placed = sim.view().current() >= 0
        again = sim.arrays.clock[0, lay.RETRY_COUNT]
        complete = np.isfinite(found.response_s).sum()
        # A client may hang up on a request that is nowhere at the time.
        dropped = (found.server[:offered] == -1).sum() - (
            waits_to_be_placed and found.server[sim.view().current()] == -1
        )
        gone = (found.gave_up & (found.server >= 0)).sum()
        assert offered == complete + dropped + gone + held(sim).sum() + again + waits_to_be_placed
        assert sim.view().now_s() >= clock_s
        clock_s = sim.view().now_s()
    assert not held(sim).any()
    assert again == 0


@few
@given(instance=fleets(), seed=seeds)
def test_every_page_is_free_or_in_use_or_part_of_one_cached_block(instance, seed):
    for sim in decisions(loaded(instance), seed):
        page, block = sim.arrays.rules[[lay.PAGE_TOKENS, lay.BLOCK_TOKENS]]
        for replica in range(NUM):
            row = sim.arrays.state[0, replica]
            has = sim.arrays.cached[0, 0, 1:] >> replica & 1 == 1
            holders = sim.arrays.links[0, replica, lay.HOLDERS, 1:][has]
            cached = has.sum() * block / page
            assert row[lay.EVICTABLE] == (holders == 0).sum() * block / page
            assert row[lay.FREE] >= 0
            total = row[lay.FREE] + cached + pages_in_use(sim, replica)
            assert total == sim.arrays.replica_params[0, replica, lay.NUM_PAGES]


@few
@given(instance=fleets(), seed=seeds)
def test_no_replica_that_holds_a_request_idles_and_none_holds_more_than_it_may(instance, seed):
    _, engine, _, _ = instance
    for sim in decisions(loaded(instance), seed):
        state = sim.arrays.state[0]
        assert ((held(sim) > 0) == (state[:, lay.BUSY] > 0)).all()
        running = state[:, lay.DECODING] + state[:, lay.PREFILLING]
        assert (running <= engine.max_batch).all()
        down = state[:, lay.STATUS] == lay.DOWN
        assert not held(sim)[down].any()


@few
@given(instance=fleets(num_routers=2), seed=seeds)
def test_what_is_measured_of_a_fleet_keeps_to_its_bounds(instance, seed):
    scenario, _, asks, _ = instance
    *_, sim = decisions(loaded(instance), seed)
    found = sim.view().outcomes()
    done = np.isfinite(found.response_s)
    assert (found.first_token_s[done] <= found.response_s[done]).all()
    assert (found.wasted_tokens >= 0).all()
    assert (found.attempts <= 3).all()
    assert (found.hit_tokens + found.prefilled_tokens >= found.context_tokens * done).all()
    row = summarise(scenario, Run(found, np.zeros(len(asks))))
    for key, value in row.items():
        assert math.isnan(value) or not key.endswith("_fraction") or 0 <= value <= 1, key
    if done.any():
        # Clients may hang up after the first token. Who has none is given the longest there is.
        of_others = np.nanmax(found.first_token_s[~done], initial=0.0)
        bound_s = np.maximum(found.offered_response_s, of_others).mean()
        assert row["mean_ttft_s"] <= bound_s * (1 + 1e-12)
        assert row["p50_itl_s"] <= row["p99_itl_s"] or math.isnan(row["p50_itl_s"])


@few
@given(instance=fleets(churns=False), seed=seeds)
def test_every_generated_token_but_the_first_has_its_latency_counted(instance, seed):
    *_, sim = decisions(loaded(instance), seed)
    found = sim.arrays.outcomes[0]
    first_tokens = np.isfinite(found[:, lay.FIRST_TOKEN_S]).sum()
    generated = found[:, lay.GENERATED].sum()
    assert sim.view().outcomes().latency_counts.sum() == generated - first_tokens


@few
@given(instance=fleets(num_routers=2), other=fleets(num_routers=2), seed=seeds)
def test_equal_streams_and_actions_give_equal_bytes_though_another_fleet_runs_between(
    instance, other, seed
):
    def lives(sim):
        for one in decisions(sim, seed):
            arrays = (one.arrays.tables, one.observe(), one.rewards, one.arrays.latencies)
            yield [array.tobytes() for array in arrays]

    alone = list(lives(loaded(instance)))
    disturbing = lives(loaded(other))
    together = []
    for moment in lives(loaded(instance)):
        together.append(moment)
        next(disturbing, None)
    assert together == alone


@few
@given(drawn=st.lists(fleets(), min_size=3, max_size=3), seed=seeds)
def test_a_copy_among_many_lives_the_life_it_would_live_alone(drawn, seed):
    scenario, engine, _, _ = drawn[0]
    length = min(len(asks) for _, _, asks, _ in drawn)
    streams = [a_stream(asks[:length], changes) for _, _, asks, changes in drawn]
    rng = np.random.default_rng(seed)
    many = a_sim(scenario, [engine] * NUM, length, 3)
    alone = [a_sim(scenario, [engine] * NUM, length) for _ in streams]
    for copy, stream in enumerate(streams):
        many.load(copy, stream)
        alone[copy].load(0, stream)
    while many.undecided():
        actions = rng.integers(0, NUM, 3)
        observations, rewards = many.step_and_observe(actions)
        for copy, sim in enumerate(alone):
            one_observation, one_reward = sim.step_and_observe(actions[[copy]])
            assert one_reward[0] == rewards[copy]
            assert one_observation[0].tobytes() == observations[copy].tobytes()
    for copy, sim in enumerate(alone):
        assert sim.arrays.outcomes[0].tobytes() == many.arrays.outcomes[copy].tobytes()


@few
@given(instance=fleets(), wrong=st.sampled_from([-1, NUM, 2**40]), seed=seeds)
def test_an_action_that_names_no_replica_is_refused_and_changes_nothing(instance, wrong, seed):
    sim = loaded(instance, num_copies=2)
    before = [array.tobytes() for array in sim.arrays]
    with pytest.raises(ValueError, match=rf"action {wrong} of copy 1 names no replica"):
        sim.step_and_observe(np.array([0, wrong]))
    assert [array.tobytes() for array in sim.arrays] == before


# What the router sees.

SCRAPE_S = 1.0


def truth(sim):
    """What a scrape of every replica would publish now."""
    state, params = sim.arrays.state[0], sim.arrays.replica_params[0]
    spare = state[:, lay.FREE] + state[:, lay.EVICTABLE]
    return {
        "waiting": state[:, lay.WAITING].copy(),
        "running": state[:, lay.DECODING] + state[:, lay.PREFILLING],
        "kv": 1.0 - spare / params[:, lay.NUM_PAGES],
        "up": state[:, lay.STATUS] == lay.UP,
    }


def own_outstanding(sim, router, placed):
    """Requests of a router that it has sent to each replica and not got back, from its records."""
    found = sim.arrays.outcomes[0]
    now = sim.view().now_s()
    count = np.zeros(NUM)
    for index, replica in placed.items():
        back = found[index, lay.FINISH_S] <= now or found[index, lay.GAVE_UP]
        if not back and sim.arrays.requests[0, index, lay.ROUTER] == router:
            count[replica] += 1
    return count


def truths(instance, actions):
    """What a scrape publishes at each of its instants, with the help of a request to nowhere.

    It is too large for any replica and is dropped, so that it does no more than stop the clock.
    """
    scenario, engine, asks, changes = instance
    last_s = max(ask.submit_s for ask in asks)
    # Larger than every drawn request too, some of which fit nowhere: it is known by its size.
    largest = max([engine.num_pages * engine.page_tokens, *(ask.context for ask in asks)]) + 1
    ticks = [Ask(SCRAPE_S * k, largest, 1) for k in range(int(last_s / SCRAPE_S) + 1)]
    both = sorted([*ticks, *asks], key=lambda ask: (ask.submit_s, ask.context != largest))
    sim = loaded((scenario, engine, both, changes))
    left, found = list(actions), {}
    while sim.view().current() >= 0:
        is_tick = both[sim.view().current()].context == largest
        if is_tick:
            found[sim.view().now_s()] = truth(sim)
        sim.step(np.array([0 if is_tick else left.pop(0)]))
    return found


@few
@given(instance=fleets(num_routers=2, scrape_interval_s=SCRAPE_S), seed=seeds)
def test_what_is_scraped_is_the_state_at_the_last_scrape_and_ones_own_in_flight_counts_are_of_now(
    instance, seed
):
    scenario, engine, asks, changes = instance
    fleet = scenario.fleet.model_copy(update={"max_retries": 0})
    instance = scenario.model_copy(update={"fleet": fleet}), engine, asks, changes
    actions = np.random.default_rng(seed).integers(0, NUM, len(asks)).tolist()
    published = truths(instance, actions)
    sim = loaded(instance)
    outcomes = sim.arrays.outcomes[0]
    placed: dict[int, int] = {}
    while sim.view().current() >= 0:
        index, now = sim.view().current(), sim.view().now_s()
        scraped_s = SCRAPE_S * math.floor(now / SCRAPE_S)
        scraped, table, state = published[scraped_s], sim.arrays.tables[0], sim.arrays.state[0]
        assert (table[:, ob.AGE_S] == now - scraped_s).all()
        assert table[:, ob.KV_USED_FRACTION].tolist() == scraped["kv"].tolist()
        assert (table[:, ob.ROUTABLE] == scraped["up"]).all()
        assert sim.view().offered() == (np.flatnonzero(scraped["up"]).tolist() or list(range(NUM)))
        assert (state[:, lay.SCRAPED_WAITING] == scraped["waiting"]).all()
        assert (state[:, lay.SCRAPED_RUNNING] == scraped["running"]).all()
        router = asks[index].router
        own = own_outstanding(sim, router, placed)
        assert (sim.arrays.routers[0, router, :, lay.OWN_COUNT] == own).all()
        assert (table[:, ob.NUM_WAITING] + table[:, ob.NUM_RUNNING] >= own).all()
        sim.step(np.array([actions[index]]))
        placed[index] = actions[index]
        for lost in [i for i in placed if outcomes[i, lay.SERVER] < 0]:
            del placed[lost]


def view(sim):
    return sim.arrays.tables[0].tobytes()


@few
@given(
    engine=engines(),
    some=jobs(max_size=10),
    routers=st.lists(st.integers(0, 1), min_size=10, max_size=10),
    seed=seeds,
)
def test_before_the_next_scrape_a_router_sees_nothing_of_what_another_does(
    engine, some, routers, seed
):
    """Router 0 uses the first two of four replicas, router 1 the others, in two ways."""
    engine = dataclasses.replace(engine, queue_limit=100)
    asks = [
        Ask(**dataclasses.asdict(job), router=router)
        for job, router in zip(some, routers, strict=False)
    ]
    four = [engine] * 4
    scenario = a_fleet(
        four, classes=PRIORITIES, num_routers=2, scrape_interval_s=1e9, max_retries=0
    )
    sims = [a_sim(scenario, four, len(asks)) for _ in range(2)]
    rngs = [np.random.default_rng([seed, which]) for which in range(3)]
    for sim in sims:
        sim.load(0, a_stream(asks))
    while sims[0].view().current() >= 0:
        assert sims[0].view().current() == sims[1].view().current()
        mine = asks[sims[0].view().current()].router == 0
        common = rngs[2].integers(2)
        if mine:
            assert view(sims[0]) == view(sims[1])
        for sim, rng in zip(sims, rngs, strict=False):
            sim.step(np.array([common if mine else 2 + rng.integers(2)]))


def test_a_router_does_not_see_what_another_has_just_sent_to_the_same_replica():
    fleet = a_fleet([SECOND] * 2, num_routers=2, scrape_interval_s=1e9)
    asks = [
        Ask(0.0, 4, 50), Ask(0.0, 4, 50, router=1), Ask(9.5, 4, 9, router=1), Ask(9.5, 4, 9)
    ]  # fmt: skip
    views = []
    for choice in (0, 1):
        sim = a_sim(fleet, [SECOND] * 2, len(asks))
        sim.load(0, a_stream(asks))
        for action in (0, 0, choice):
            sim.step(np.array([action]))
        views.append(view(sim))
    assert views[0] == views[1]


def test_a_router_does_not_believe_that_a_refused_prompt_is_cached():
    engine = dataclasses.replace(SECOND, block_tokens=4)
    fleet = a_fleet([engine], max_retries=0)
    # The first fits; the second has more pages than the replica owns, and is refused.
    asks = [
        Ask(0.0, 8, 2, chain=(1,)), Ask(1.0, 4096, 2, chain=(2,)),
        Ask(2.0, 8, 2, chain=(2,)), Ask(3.0, 8, 2, chain=(1,)),
    ]  # fmt: skip
    sim = a_sim(fleet, [engine], len(asks))
    sim.load(0, a_stream(asks))
    matches = []
    while sim.view().current() >= 0:
        matches.append(float(sim.arrays.tables[0, 0, ob.MATCH_TOKENS]))
        sim.step(np.array([0]))
    assert sim.arrays.outcomes[0, 1, lay.SERVER] < 0
    assert matches == [0.0, 0.0, 0.0, 4.0]


def test_a_replica_that_fails_and_is_back_before_the_scrape_looks_as_it_did():
    engine = dataclasses.replace(SECOND, block_tokens=4)
    fleet = a_fleet([engine], scrape_interval_s=10.0, max_retries=3, retry_delay_s=100.0)
    chain = (1, 2)
    asks = [
        Ask(0.0, 9, 50, chain=chain),
        Ask(11.0, 9, 1, chain=chain),
        Ask(15.0, 9, 1, chain=chain),
    ]
    asks.append(Ask(21.0, 9, 1, chain=chain))
    sim = a_sim(fleet, [engine], len(asks))
    sim.load(0, a_stream(asks, (Change(12.0, 0, "fail"), Change(13.0, 0, "join"))))
    sim.step(np.array([0]))
    before = sim.arrays.tables[0, 0].copy()
    sim.step(np.array([0]))
    table = sim.arrays.tables[0, 0]
    assert table[ob.KV_USED_FRACTION] == before[ob.KV_USED_FRACTION] > 0
    assert table[ob.MATCH_TOKENS] == before[ob.MATCH_TOKENS] == 8
    assert table[ob.AGE_S] == 5.0
    sim.step(np.array([0]))
    # At 20 s it is scraped with the third request done, and its blocks back in the cache.
    assert sim.arrays.tables[0, 0, ob.KV_USED_FRACTION] == 0
    assert sim.arrays.tables[0, 0, ob.MATCH_TOKENS] == 8


@few
@given(
    engine=engines(),
    some=jobs(patient=True, ordered=True),
    bound_s=st.sampled_from([0.0, 1.0, 1000.0]),
)
def test_a_request_is_overtaken_in_its_priority_only_by_those_that_arrive_within_the_bound(
    engine, some, bound_s
):
    # With memory for all none is preempted: prompts are done in the order of their admission.
    engine = dataclasses.replace(engine, num_pages=1000, queue_limit=100)
    fleet = a_fleet([engine], classes=PRIORITIES)
    fleet = fleet.model_copy(update={"max_overtaking_s": bound_s})
    asks = [Ask(**dataclasses.asdict(job)) for job in some]
    sim = a_sim(fleet, [engine], len(asks))
    sim.load(0, a_stream(asks))
    for ask in asks:
        step(sim, ask, 0)
    sim.drain()
    first_s = sim.arrays.outcomes[0, :, lay.FIRST_TOKEN_S]
    assert np.isfinite(first_s).all()
    for after, later in enumerate(asks):
        for before in range(after):
            if later.priority == asks[before].priority and first_s[before] > first_s[after]:
                assert later.submit_s <= asks[before].submit_s + bound_s


@few
@given(instance=fleets(), seed=seeds)
def test_keys_that_are_the_time_of_submission_change_nothing(instance, seed):
    sim, twin = loaded(instance), loaded(instance)
    rng = np.random.default_rng(seed)
    while sim.view().current() >= 0:
        replica = rng.integers(0, NUM, 1)
        twin.order_next(0, OrderKey(twin.view().now_s()))
        assert sim.step(replica).tobytes() == twin.step(replica).tobytes()
    sim.drain()
    twin.drain()
    assert sim.arrays.outcomes.tobytes() == twin.arrays.outcomes.tobytes()
    assert sim.arrays.state.tobytes() == twin.arrays.state.tobytes()
