"""Promotion, rollback, stop, time-out and crash in every order: alias and policy never part.

An event loop whose clock stands still, and threads that return when the schedule says so: every
run is one sequence of choices, and all sequences are tried, depth first.
"""

import asyncio
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from unit.serve_builders import marginal_artifact

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy import champion_alias
from serve_app.policy import manager as manager_module
from serve_app.policy.experiment import Conflict
from serve_app.policy.loading import from_artifact, in_order
from serve_app.policy.manager import PolicyManager
from serve_app.policy.state import GatewayState, StateFile
from tokenyard.artifact import RegistryError
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.policies.rule_name import Term
from tokenyard.routing.scenario import load_scenario

URI, SCENARIO = "a store", "poisson_085"
NAMES = ("p0", "x1", "x2")
POLICIES = {
    name: from_artifact(
        name,
        marginal_artifact(np.full(NUM_MARGINAL_WEIGHTS, 0.1 * i)),
        "t",
        load_scenario(SCENARIO),
    )
    for i, name in enumerate(NAMES)
}
SHAS = {loaded.card.sha256: name for name, loaded in POLICIES.items()}
MOST_STEPS = 400


class StillLoop(asyncio.SelectorEventLoop):
    """Its clock goes on when it is told to."""

    now_s = 0.0

    def time(self):
        return self.now_s

    def tick(self):
        """Run what is ready now, once."""
        self.call_soon(self.stop)
        self.run_forever()

    @property
    def is_idle(self):
        return not self._ready


class ThreadCall:
    """A call in a thread: it takes effect at one time, and returns at another."""

    def __init__(self, function, args, answer):
        self.function, self.args, self.answer = function, args, answer
        self.has_acted, self.result, self.error = False, None, None

    def go_on(self):
        """Take the next of both steps; return whether it was the last."""
        if not self.has_acted:
            self.has_acted = True
            try:
                self.result = self.function(*self.args)
            except Exception as error:
                self.error = error
            return False
        if not self.answer.done():
            if self.error is None:
                self.answer.set_result(self.result)
            else:
                self.answer.set_exception(self.error)
        return True


class Store:
    """A registry of one model, whose writes may fail before or after they have worked."""

    def __init__(self):
        self.versions = {"1": "p0"}
        self.aliases = {"champion": "1"}
        self.num_writes, self.fails = 0, {}

    def enter(self, uri, model, artifact, tags):
        name = SHAS[artifact.sha256]
        version = next((v for v, held in self.versions.items() if held == name), None)
        version = version or str(len(self.versions) + 1)
        self.versions[version] = name
        return version, dict(self.aliases)

    def settle(self, uri, model, wanted, known):
        self.num_writes += 1
        how = self.fails.get(self.num_writes)
        if how == "before":
            raise RegistryError("away")
        if self.aliases.get("champion") not in {None, wanted.get("champion"), *known}:
            return False
        self.aliases = dict(wanted)
        if how == "after":
            raise RegistryError("the answer is lost")
        return True

    @property
    def champion(self):
        return self.versions[self.aliases["champion"]]


class MemoryFile(StateFile):
    """A state file, its bytes kept here: what counts is what has been written."""

    def __init__(self, text=None):
        self.text, self.is_closed = text, False

    def read(self):
        return None if self.text is None else GatewayState.model_validate_json(self.text)

    def write(self, state):
        self.text = state.model_dump_json()


class Gateway:
    """One life of a gateway: from its start to its crash."""

    def __init__(self, store, text=None):
        self.loop, self.store, self.calls = StillLoop(), store, []
        settings = CircuitBreakerSettings()
        self.manager = PolicyManager(
            SCENARIO, "sed", settings, np.random.default_rng(0), URI, in_thread=self.in_thread
        )
        self.file = MemoryFile(text)
        self.loop.run_until_complete(self.begin())

    async def begin(self):
        self.manager.resume("champion", file=self.file)
        if self.manager._alias is not None and not self.manager._alias.is_settled:
            self.manager._alias.follow()

    async def in_thread(self, function, *args):
        call = ThreadCall(function, args, self.loop.create_future())
        self.calls.append(call)
        return await call.answer

    def spawn(self, work):
        """Begin a coroutine on the loop, which is not running now."""
        return self.loop.create_task(work)

    def ask(self, action):
        return self.spawn(self.manager.change(action))

    def canary(self, name):
        self.manager.start_experiment(name, "canary", 0.2, prepared=POLICIES[name])

    def go_on(self, number):
        if self.calls[number].go_on():
            del self.calls[number]

    def run_out(self):
        """Let everything end in the order in which it was begun."""
        for _ in range(MOST_STEPS):
            if not self.loop.is_idle:
                self.loop.tick()
            elif self.calls:
                self.go_on(0)
            elif self.loop._scheduled:
                self.loop.now_s = self.loop._scheduled[0].when() + 1.0
                self.loop.tick()
            else:
                return
        raise AssertionError("it does not come to rest")

    def end(self):
        """Crash: nothing more runs."""
        self.file = None  # What is written from here on was never on the disk.
        self.manager.stop()
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.tick()
        self.loop.close()


class Schedule:
    """A sequence of choices: those given, and then always the first."""

    def __init__(self, given):
        self.given, self.widths = given, []

    def choose(self, num):
        at = len(self.widths)
        self.widths.append(num)
        return self.given[at] if at < len(self.given) else 0

    def following(self):
        """The next sequence, depth first; None: this was the last."""
        made = [*self.given, *[0] * (len(self.widths) - len(self.given))]
        while made and made[-1] + 1 == self.widths[len(made) - 1]:
            made.pop()
        return [*made[:-1], made[-1] + 1] if made else None


def explore(one_run, most=20_000):
    """Call `one_run` under every schedule; return how many there are."""
    given = []
    for number in count(1):
        schedule = Schedule(given)
        one_run(schedule)
        given = schedule.following()
        if given is None:
            return number
        assert number < most, "there are too many schedules to try"


def run_with(gateway, intruders, schedule):
    """Take steps until nothing is left to do; return whether it crashed."""
    waiting = dict(intruders)
    for _ in range(MOST_STEPS):
        # What is ready runs before another answer comes: an intruder may come at any time.
        steps = [("tick", None)] if not gateway.loop.is_idle else []
        if not steps:
            steps = [("go on", i) for i in range(len(gateway.calls))]
        if not steps and not waiting:
            return False
        steps += [("intrude", name) for name in waiting]
        what, which = steps[schedule.choose(len(steps))]
        if what == "tick":
            gateway.loop.tick()
        elif what == "go on":
            gateway.go_on(which)
        elif which == "crash":
            return True
        else:
            waiting.pop(which)(gateway)
    raise AssertionError("it does not come to rest")


def check_together(gateway, promoting=None):
    """Alias and policy say the same, and so does the answer."""
    manager, store = gateway.manager, gateway.store
    active = manager.policy
    if active.by_hand:
        # Somebody has named the policy: the alias is as that change has found it.
        assert active.aliases is None or store.aliases == active.aliases
    else:
        assert active.loaded.card.sha256 == POLICIES[store.champion].card.sha256
    if promoting is not None and promoting.done() and not promoting.cancelled():
        done = sum(one.what == "promoted" for one in manager.events) - 1
        refused = isinstance(promoting.exception(), Conflict)
        assert promoting.exception() is None or refused
        assert done == (not refused)


INTRUDERS = {
    "worse": lambda gateway: gateway.manager.end_experiment("it is worse than the champion"),
    "stop": lambda gateway: setattr(gateway, "other", gateway.ask("stop")),
    "rollback": lambda gateway: setattr(gateway, "other", gateway.ask("rollback")),
    "late": lambda gateway: setattr(gateway.loop, "now_s", gateway.loop.now_s + 31.0),
    "left": lambda gateway: gateway.promoting.cancel(),
    "crash": None,
}


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    """No MLflow, no compiling; `champion` is what the alias of the present store names."""
    stores = []

    def resolve(name, *_):
        if name == "champion":
            return POLICIES[stores[-1].champion]
        return baseline if name == "sed" else known(name, SCENARIO)

    known = manager_module.resolve_policy
    baseline = known("sed", SCENARIO)
    monkeypatch.setattr(manager_module, "resolve_policy", resolve)
    monkeypatch.setattr(manager_module, "warm_up", lambda _: None)
    for name in ("enter", "settle"):
        monkeypatch.setattr(
            champion_alias.registry, name,
            lambda *args, name=name: getattr(stores[-1], name)(*args),
        )  # fmt: skip
    return stores


def a_world(stores, fails=None):
    """A gateway that has promoted x1 and is asked to promote x2."""
    store = Store()
    stores.append(store)
    gateway = Gateway(store)
    gateway.canary("x1")
    first = gateway.ask("promote")
    gateway.run_out()
    assert first.exception() is None
    assert store.champion == "x1"
    store.num_writes, store.fails = 0, dict(fails or {})
    gateway.canary("x2")
    gateway.promoting = gateway.ask("promote")
    gateway.promoting.add_done_callback(lambda one: one.cancelled() or one.exception())
    return gateway


def one_run(stores, names, schedule, fails=None):
    gateway = a_world(stores, fails)
    store = gateway.store
    crashed = run_with(gateway, {name: INTRUDERS[name] for name in names}, schedule)
    if not crashed:
        gateway.run_out()
        check_together(gateway, gateway.promoting)
        other = getattr(gateway, "other", None)
        assert other is None or other.exception() is None or "stop" in names
    text = gateway.file.text
    gateway.end()
    # Crashed or not: the next gateway goes on where this one was.
    successor = Gateway(store, text)
    successor.run_out()
    check_together(successor)
    if not crashed:
        assert successor.manager.policy.label == gateway.manager.policy.label
    successor.end()


def test_a_policy_promoted_in_an_order_decides_in_it_after_a_restart_and_no_alias_moves(fakes):
    store = Store()
    fakes.append(store)
    gateway = Gateway(store)
    ordered = in_order(POLICIES["x1"], Term.parse("sjf@20"), load_scenario(SCENARIO))
    gateway.manager.start_experiment("x1+sjf@20", "shadow", 0.2, prepared=ordered)
    promoting = gateway.ask("promote")
    gateway.run_out()
    assert promoting.exception() is None
    assert gateway.manager.policy.loaded.card.name == "x1+sjf@20"
    # An alias names a file, and whoever reads that gets no order.
    assert store.champion == "p0"
    text = gateway.file.text
    gateway.end()
    successor = Gateway(store, text)
    successor.run_out()
    assert successor.manager.policy.label == ordered.card.name + "@" + ordered.card.sha256
    successor.end()


def test_a_promoted_candidate_is_the_champion_that_is_found_by_another_name(fakes):
    """Its canary goes on, and the way back is to what decided before it."""
    store = Store()
    fakes.append(store)
    gateway = Gateway(store)
    loaded = POLICIES["x1"]
    card = loaded.card.model_copy(update={"name": "candidate"})
    candidate = replace(loaded, card=card)
    gateway.manager.start_experiment("candidate", "canary", 0.2, prepared=candidate)
    gateway.ask("promote")
    gateway.run_out()
    assert store.champion == "x1"
    gateway.canary("x2")
    gateway.spawn(gateway.manager.store.save())
    gateway.run_out()
    text = gateway.file.text
    gateway.end()
    successor = Gateway(store, text)
    successor.run_out()
    manager = successor.manager
    assert manager.policy.label == loaded.card.name + "@" + loaded.card.sha256
    assert manager.experiment.running
    successor.ask("rollback")
    successor.run_out()
    check_together(successor)
    assert store.champion == "p0"
    successor.end()


ONE = [(name,) for name in INTRUDERS]
TWO = [("crash", "late"), ("crash", "rollback")]


FAILS = [
    pytest.param({}, id="well"),
    pytest.param({1: "before"}, id="fails", marks=pytest.mark.slow),
    pytest.param({1: "after"}, id="lost"),
]


@pytest.mark.parametrize("names", ONE, ids="+".join)
@pytest.mark.parametrize("fails", FAILS)
def test_a_promotion_and_what_comes_between_leave_alias_and_policy_together(fakes, names, fails):
    assert explore(lambda schedule: one_run(fakes, names, schedule, fails)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("names", TWO, ids="+".join)
def test_so_do_two_that_come_between(fakes, names):
    assert explore(lambda schedule: one_run(fakes, names, schedule)) > 100
