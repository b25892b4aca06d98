"""The control loop that reshapes a pool: asks a policy for a plan, and carries it out under load.

Once per slot it sums up the demand of that slot, shows the policy what it may know, and takes its
plan. In between it starts and stops replicas (`serve_app.allocation.transition`), until the pool is
what it should be. What the policy cannot do: pass the GPU budget, leave fewer replicas ready than
the minimum, change more often than the scenario's switch budget, hysteresis and cooldown allow, or
ask for another plan while a change is on its way. Where it fails, an autoscaler decides.

With a `time_scale` (`serve_app.engines.emulation`) a slot takes so many times as long, and demand
is counted in the scenario's own time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from serve_app.allocation.plan_limits import PlanLimits
from serve_app.allocation.plans import BUILT_IN, PlanOrigin, format_plan, modelled, plan_of
from serve_app.allocation.transition import Held, Shape, gpus_held, is_done, next_wanted, shape_of
from serve_app.cluster import ReshapingLimits
from serve_app.gateway.clocks import steady_unix_s
from tokenyard.allocation.dynamics import NUM_OUT, USD, VIOLATIONS, make_model, run_slot
from tokenyard.allocation.forecast import history_slots
from tokenyard.allocation.plans import PlanTable, plan_table
from tokenyard.allocation.policies import make_allocation_policy
from tokenyard.allocation.policies.rules import AllocationContext
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.telemetry import SlotRecord
from tokenyard.allocation.types import AllocationPolicy, AllocationState, Plan

logger = logging.getLogger(__name__)

STAND_IN = "autoscaler_70"
"""Decides where the policy cannot; it needs nothing that was trained or tuned."""

By = Literal["start", "policy", "stand_in", "hand", "undo"]
Outcome = Literal["under way", "done", "dry run", "refused", "given up"]
_DECIDE_S = 5.0
"""Longest time that a policy may take; one that hangs is not asked again."""
_TICK_S = 0.5
_STEADY_SLOTS = 600
"""Latest slots that the rate of the moment may be the mean of."""
_HISTORY_CHANGES = 200


class PoolControl(Protocol):
    """Starts and stops replicas, and knows the demand for them."""

    async def observe(self) -> dict[Shape, Held]:
        """Return every shape of which there is or should be a replica."""

    async def want(self, shape: Shape, count: int) -> None:
        """Ask for so many replicas of a shape; returns before they are there."""

    async def limit_batch(self, shape: Shape, max_batch: int) -> bool:
        """Let replicas of a shape run so many sequences at once; False while some do not yet."""

    def num_offered(self) -> int:
        """Requests that have ever asked to be let in."""

    def num_waiting(self) -> int:
        """Requests that wait now."""

    def record(self, slot: SlotRecord) -> None:
        """Write down what a slot that is over was like; called in a thread."""


@dataclass
class Change:
    """A change of plan, made or refused."""

    time_s: float
    """When it was decided, Unix time."""
    by: By
    old: Plan
    new: Plan
    reason: str
    outcome: Outcome
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the decision: `first_ready`, a replica of the new shape serves; `all_ready`,
    all of them do; `done`, the old ones have answered what they had begun and are gone."""


class Allocator:
    """Decides on plans and carries them out; one event loop runs it."""

    def __init__(
        self,
        scenario: AllocationScenario,
        policy_name: str,
        policy: AllocationPolicy,
        pool: PoolControl,
        settings: ReshapingLimits,
        start: Plan | None = None,
        time_scale: float = 1.0,
        clock_s: Callable[[], float] = steady_unix_s,
        origin: PlanOrigin = BUILT_IN,
    ) -> None:
        """Prepare the loop; nothing is started before `run`.

        `start` is the first plan; None: the cheapest that serves half of what the pool can.
        `time_scale` is seconds of real time per second of the scenario, and `clock_s` Unix time
        that does not go back, seconds.
        """
        self.scenario, self.settings, self.dry_run = scenario, settings, settings.dry_run
        self.slot_s = scenario.slot_s * time_scale
        self.table: PlanTable = plan_table(scenario)
        self.budget = scenario.num_gpus
        self.policy_name, self.origin = policy_name, origin
        self.fallbacks: Counter[str] = Counter()
        self._clock_s = clock_s
        # What is known of a part of a slot says little of demand: counting begins with the next.
        first_slot = math.ceil(clock_s() / self.slot_s)
        self.limits = PlanLimits(scenario, self.table, settings, first_slot)
        self.plan = start or self.limits.start()
        """The plan in force, or about to be."""
        self.proposed = self.plan
        """What the policy asked for last."""
        self.reason = "nothing was decided yet"
        self.by_hand = False
        self.changes: deque[Change] = deque(maxlen=_HISTORY_CHANGES)
        self._history = history_slots(scenario.slots_per_day)
        self.demand_per_s: deque[float] = deque(maxlen=self._history)
        """Requests per second of past slots, in the scenario's time, the latest last."""
        self.held: dict[Shape, Held] = {}
        context = AllocationContext(scenario, np.random.default_rng())
        self._policy, self._stand_in = policy, make_allocation_policy(STAND_IN, context)
        self._hangs = False
        self._pool = pool
        self._model = make_model(scenario)
        self._out = np.zeros(NUM_OUT)
        self._change: Change | None = None
        self._limited = True
        """Whether all replicas of the plan run as many sequences at once as it says."""
        self._began_s = 0.0
        self._requests: deque[float] = deque(maxlen=_STEADY_SLOTS)
        self._offered_before = pool.num_offered()

    async def run(self) -> None:
        """Begin with the saved plan, or else with that of the start; then run without end."""
        is_begun = False
        while True:
            try:
                if not is_begun:
                    await self._begin_anew()
                    is_begun = True
                await self.tick()
            except Exception:
                # Serve's controller may be away for a while; the next tick looks again.
                logger.exception("the allocator goes on")
            await asyncio.sleep(_TICK_S)

    async def _begin_anew(self) -> None:
        self.held = await self._pool.observe()
        old = plan_of(self.table, self.held) or self.plan
        if not self.by_hand:
            self.plan = self.proposed = old
        why = "it was set by hand before" if self.by_hand else "the plan of the start"
        self._begin("start", old, self.plan, why)

    async def tick(self) -> None:
        """Look at the pool, decide if a slot is over, and take the next step towards the plan."""
        self.held = await self._pool.observe()
        if self._slot_now() < self.limits.slot:
            self._offered_before = self._pool.num_offered()
        elif self._slot_now() > self.limits.slot:
            await self._close_slot()
        shape, count = shape_of(self.plan), self.plan.num_replicas
        minimum = min(self.settings.min_replicas, count)
        counts = next_wanted(self.held, shape, count, self.budget, minimum)
        for other, wanted in counts.items():
            if wanted != self.held.get(other, Held()).wanted:
                await self._pool.want(other, wanted)
        self._limited = await self._pool.limit_batch(shape, self.plan.max_batch)
        self._keep_time()

    def set_policy(
        self, name: str, policy: AllocationPolicy, origin: PlanOrigin = BUILT_IN
    ) -> None:
        """Let another policy decide; a plan that was set by hand no longer holds."""
        self.policy_name, self._policy, self.origin = name, policy, origin
        self._hangs, self.by_hand = False, False

    def set_plan(self, plan: Plan) -> None:
        """Change to a plan and keep it until a policy is set.

        Raises:
            ValueError: It is infeasible, cannot be reached, or a change is on its way.
        """
        self.table.find(plan)
        if plan != self.plan:
            refusal = self._refusal(plan, by_hand=True)
            if refusal is not None:
                raise ValueError(refusal)
            self._begin("hand", self.plan, plan, "set by hand")
        self.by_hand = True

    def saved(self) -> dict[str, Any]:
        """What a person has set and which changes were made lately; `restore` reads it."""
        return {
            "plan": asdict(self.plan) if self.by_hand else None,
            "dry_run": self.dry_run if self.dry_run != self.settings.dry_run else None,
            **self.limits.saved(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what a person had set and what is left of the switch budget; called before `run`.

        Raises:
            ValueError: It is no plan of this scenario; the rest is taken up.
        """
        if saved["dry_run"] is not None:
            self.dry_run = bool(saved["dry_run"])
        self.limits.restore(saved)
        if saved["plan"] is not None:
            plan = Plan(**saved["plan"])
            self.table.find(plan)
            self.plan = self.proposed = plan
            self.by_hand = True

    @property
    def is_changing(self) -> bool:
        """Whether the pool is being reshaped."""
        return self._change is not None

    @property
    def may_switch(self) -> bool:
        """Whether the policy may ask for another plan now."""
        return self.limits.may_switch and not self.is_changing and not self.by_hand

    def predicted(self, plan: Plan, demand_per_s: float) -> tuple[float, float]:
        """GPU cost, dollars, and SLO violations predicted for a slot of a demand under a plan."""
        i = self.table.find(plan)
        run_slot(self._model, i, i, demand_per_s, 0.0, self._out)
        return float(self._out[USD]), float(self._out[VIOLATIONS])

    async def _write(self, first_slot: int, num_slots: int) -> None:
        demand = self.demand_per_s[-1]
        for slot in range(first_slot, first_slot + num_slots):
            record = SlotRecord(
                slot=slot, time_s=self._clock_s(), demand_per_s=demand,
                waiting=self._pool.num_waiting(), gpus_held=gpus_held(self.held),
                plan=format_plan(self.plan), proposed=format_plan(self.proposed),
            )  # fmt: skip
            try:
                await asyncio.to_thread(self._pool.record, record)
            except OSError as error:
                logger.warning("a slot is missing in the allocation log: %s", error)

    def _slot_now(self) -> int:
        return int(self._clock_s() / self.slot_s)

    async def _close_slot(self) -> None:
        """Sum up the demand of the slots that are over, and decide."""
        now, offered = self._slot_now(), self._pool.num_offered()
        slots = now - self.limits.slot
        requests = max(offered - self._offered_before, 0) / slots
        self._requests.extend([requests] * min(slots, _STEADY_SLOTS))
        # In the scenario's time everything is `time_scale` times faster.
        self.demand_per_s.extend([requests / self.scenario.slot_s] * min(slots, self._history))
        self._offered_before = offered
        self.limits.advance(now)
        wanted, by = await self._decide()
        self.proposed = wanted
        await self._write(now - slots, min(slots, self._history))
        if wanted == self.plan or self.by_hand:
            return
        plan = self.limits.attainable(self.plan, wanted)
        self.reason = self._why(plan)
        if plan != wanted:
            self.reason += (
                f"; {format_plan(wanted)}, which was asked for, could not be entered or left"
            )
        refusal = self._refusal(plan)
        if refusal is None and self.dry_run:
            self._note(by, plan, "dry run", self.reason)
        elif refusal is None:
            self._begin(by, self.plan, plan, self.reason)
        elif not self.is_changing:
            self._note(by, plan, "refused", refusal)

    async def _decide(self) -> tuple[Plan, By]:
        """Ask the policy, or its stand-in; the plan that it returns is feasible."""
        demand_per_s = list(self.demand_per_s)
        demand_per_s[-1] = steady(self._requests) / self.scenario.slot_s
        state = AllocationState(
            time_s=self.limits.slot * self.scenario.slot_s,
            plan=self.plan,
            demand_per_s=tuple(demand_per_s),
            backlog_requests=float(self._pool.num_waiting()),
            slots_since_switch=self.limits.since_slots,
            switches_left=self.limits.switches_left,
            may_switch=self.may_switch,
            budget_left=self.limits.budget_left,
            measured=modelled(self._model, self.table.find(self.plan), demand_per_s[-1]),
        )
        if not self._hangs:
            try:
                deciding = asyncio.to_thread(self._policy.allocate, state)
                plan = await asyncio.wait_for(deciding, _DECIDE_S)
                self.table.find(plan)
                return plan, "policy"
            except TimeoutError:
                self._hangs = True
                self.fallbacks["too_slow"] += 1
                logger.warning("allocation policy %s hangs; %s decides", self.policy_name, STAND_IN)
            except Exception as error:
                self.fallbacks["error"] += 1
                logger.warning("allocation policy %s failed: %r", self.policy_name, error)
        else:
            self.fallbacks["breaker_open"] += 1
        return self._stand_in.allocate(state), "stand_in"

    def _refusal(self, plan: Plan, by_hand: bool = False) -> str | None:
        """Why a plan cannot be taken now."""
        if self.is_changing:
            return "a change is on its way"
        too_soon = None if by_hand else self.limits.too_soon(self.plan, plan)
        return too_soon or self.limits.out_of_reach(self.plan, plan)

    def _why(self, plan: Plan) -> str:
        demand = self.demand_per_s[-1]
        share = demand / self.table.goodput_capacity_per_s[self.table.find(self.plan)]
        usd, violations = self.predicted(plan, demand)
        usd_now, violations_now = self.predicted(self.plan, demand)
        return (
            f"demand was {demand:.2f} per second, {share:.0%} of what {format_plan(self.plan)} "
            f"serves in time; at that {format_plan(plan)} costs ${usd:.3f} and violates "
            f"{violations:.1f} "
            f"requests per slot, against ${usd_now:.3f} and {violations_now:.1f}"
        )

    def _note(self, by: By, plan: Plan, outcome: Outcome, reason: str) -> Change:
        change = Change(self._clock_s(), by, self.plan, plan, reason, outcome)
        self.changes.append(change)
        return change

    def _begin(self, by: By, old: Plan, new: Plan, reason: str) -> None:
        self._change = Change(self._clock_s(), by, old, new, reason, "under way")
        self.changes.append(self._change)
        self._began_s = time.monotonic()
        self.limits.note(old, new)
        self.plan, self.reason = new, reason
        logger.info("allocation: %s to %s: %s", format_plan(old), format_plan(new), reason)

    def _keep_time(self) -> None:
        """Note how far a change has come; give it up when it takes too long."""
        change = self._change
        if change is None:
            return
        now_s = time.monotonic() - self._began_s
        here = self.held.get(shape_of(change.new), Held())
        if here.num_serving:
            change.phases_s.setdefault("first_ready", now_s)
        if here.num_serving == change.new.num_replicas:
            change.phases_s.setdefault("all_ready", now_s)
        if self._limited and is_done(self.held, shape_of(change.new), change.new.num_replicas):
            change.phases_s["done"] = now_s
            change.outcome, self._change = "done", None
        elif now_s > self.settings.change_timeout_s:
            change.outcome, self._change = "given up", None
            logger.error("allocation: %s is given up after %.0f s", format_plan(change.new), now_s)
            if change.by not in ("start", "undo"):
                self._begin("undo", change.new, change.old, "the change took too long")


def steady(requests: Sequence[float]) -> float:
    """Requests per slot now: the mean of the last slots, back to where demand last changed.

    A slot of few requests says little. Slots are added, the latest first, until 4,000 requests are
    counted or one differs from the mean so far by three standard deviations (Poisson).
    """
    total, slots = requests[-1], 1
    for count in list(requests)[-2::-1]:
        mean = total / slots
        if total >= 4000 or abs(count - mean) > 3.0 * math.sqrt(max(mean, 1) * (1 + 1 / slots)):
            break
        total, slots = total + count, slots + 1
    return total / slots
