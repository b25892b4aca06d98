"""How many replicas of one size a deployment should have, from what is in progress there.

Whoever asks knows how many requests are being answered, not how many arrive. By Little's law
arrivals per second are requests in progress over response time, and the performance model knows the
response time at every rate: the rate is where both agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from serve_app.allocation.plans import load_plan_policy, modelled
from tokenyard.allocation.dynamics import make_model
from tokenyard.allocation.forecast import history_slots
from tokenyard.allocation.plans import LATENCY_S, UTILISATION, load_allocation, plan_table
from tokenyard.allocation.policies.autoscaler import family
from tokenyard.allocation.types import AllocationState, Plan


@dataclass(frozen=True)
class Looks:
    """What was seen so far."""

    slot: int | None = None
    """The slot that runs; None: nothing was seen yet."""
    sum_per_s: float = 0.0
    """Arrivals per second, summed over the slot's looks."""
    num: int = 0
    demand_per_s: tuple[float, ...] = ()
    """Of past slots, the latest last."""
    slots_since_switch: int = 0


class ReplicaPlanner:
    """An allocation policy that decides on the number of replicas once per slot of a scenario.

    What a policy says of another size of replica counts as as many replicas of this size as serve
    no less within the SLO.
    """

    def __init__(
        self,
        scenario: str,
        tensor_parallel: int = 1,
        policy: str = "autoscaler_70",
        time_scale: float = 1.0,
        registry: str | None = None,
    ) -> None:
        """Read the scenario, whose GPUs are the most that is asked for.

        `tensor_parallel` is the number of GPUs of one replica, `policy` is `champion`, a policy
        file (.npz) or an allocation baseline's name, and `time_scale` is seconds of real time per
        second of the scenario.

        Raises:
            ValueError: Any of these is unknown, or no such replica attains the SLO.
        """
        self._scenario = load_allocation(scenario)
        self._table, self._model = plan_table(self._scenario), make_model(self._scenario)
        self._policy = load_plan_policy(policy, self._scenario, registry)[0]
        plans = self._table.plans
        self._family: list[Plan] = [plans[i] for i in family(self._table, tensor_parallel)]
        self._time_scale, self._history = time_scale, history_slots(self._scenario.slots_per_day)

    def look(
        self, looks: Looks, now_s: float, in_progress: float, num_replicas: int, target: int
    ) -> tuple[int, Looks]:
        """Return the number of replicas that there should be, and what to remember.

        Args:
            looks: What the last call returned.
            now_s: Time of a clock that may be set back, seconds.
            in_progress: Requests that run or wait.
            num_replicas: Replicas that there are.
            target: What the last call returned, or what was aimed at before the first.
        """
        slot = int(now_s / (self._scenario.slot_s * self._time_scale))
        now = min(self._family, key=lambda plan: abs(plan.num_replicas - num_replicas))
        if looks.slot is None:
            looks = replace(looks, slot=slot)
        elif slot != looks.slot:
            latest = looks.sum_per_s / max(looks.num, 1)
            demand = (*looks.demand_per_s, latest)[-self._history :]
            since = looks.slots_since_switch + max(slot - looks.slot, 1)
            plan = self._policy.allocate(
                AllocationState(
                    time_s=slot * self._scenario.slot_s,
                    plan=now,
                    demand_per_s=demand,
                    slots_since_switch=since,
                    measured=modelled(self._model, self._table.find(now), latest),
                )
            )
            wanted = self.replicas_for(plan)
            looks = Looks(slot, 0.0, 0, demand, 0 if wanted != target else since)
            target = wanted
        rate = self.arrivals_per_s(now, in_progress)
        return target, replace(looks, sum_per_s=looks.sum_per_s + rate, num=looks.num + 1)

    def arrivals_per_s(self, plan: Plan, in_progress: float) -> float:
        """Requests per second, in the scenario's time, that keep so many in progress.

        Beyond what the plan can hold in balance, the rest is a queue to be served within a slot.
        """
        i = self._table.find(plan)
        rates = UTILISATION * self._table.capacity_per_s[i]
        held = np.maximum.accumulate(rates * self._table.curves[i, :, LATENCY_S])
        # The last point is full load, where the queue has no end.
        rates, held = rates[:-1], held[:-1]
        queue = max(in_progress - float(held[-1]), 0.0)
        return float(np.interp(in_progress, held, rates)) + queue / self._scenario.slot_s

    def replicas_for(self, plan: Plan) -> int:
        """Replicas of the deployment of no less goodput capacity than a plan, or all there are."""
        if plan in self._family:
            return plan.num_replicas
        enough = self._table.goodput_capacity_per_s[self._table.find(plan)]
        capacities_per_s = self._table.goodput_capacity_per_s
        serves = [own for own in self._family if capacities_per_s[self._table.find(own)] >= enough]
        return (serves or self._family[-1:])[0].num_replicas
