"""An allocation policy as a Ray Serve autoscaling policy, for any deployment of equal replicas.

    autoscaling_config:
      min_replicas: 1
      max_replicas: 8
      policy:
        policy_function: serve_app.autoscaling:PlannedReplicas
        policy_kwargs: {scenario: a100x8_13b, tensor_parallel: 2, policy: champion}

Serve tells such a policy how many requests are being answered, not how many arrive. By Little's law
arrivals per second are requests in progress over response time, and the performance model knows the
response time at every rate: the rate is where both agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.serve.config import AutoscalingContext

from serve_app.allocation.plans import load_plan_policy, modelled
from tokenyard.allocation.dynamics import make_model
from tokenyard.allocation.forecast import history_slots
from tokenyard.allocation.plans import LATENCY_S, UTILISATION, load_allocation, plan_table
from tokenyard.allocation.policies.autoscaler import family
from tokenyard.allocation.types import AllocationState, Plan

_STATE = "tokenyard"


class PlannedReplicas:
    """Decides the number of replicas once per slot of an allocation scenario.

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

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and what to remember: Serve keeps it."""
        kept = dict(ctx.policy_state)
        state = kept.get(_STATE) or {"slot": None, "sum": 0.0, "looks": 0, "demand": [], "since": 0}
        slot = int((ctx.current_time or 0.0) / (self._scenario.slot_s * self._time_scale))
        num_now = ctx.current_num_replicas
        now = min(self._family, key=lambda plan: abs(plan.num_replicas - num_now))
        rate = self.arrivals_per_s(now, float(ctx.total_num_requests))
        target = ctx.target_num_replicas
        if state["slot"] is None:
            state = {**state, "slot": slot}
        elif slot != state["slot"]:
            demand = [*state["demand"], state["sum"] / max(state["looks"], 1)][-self._history :]
            # Serve tells the time of a clock that may be set back.
            since = state["since"] + max(slot - state["slot"], 1)
            plan = self._policy.allocate(
                AllocationState(
                    time_s=slot * self._scenario.slot_s,
                    plan=now,
                    demand_per_s=tuple(demand),
                    slots_since_switch=since,
                    measured=modelled(self._model, self._table.find(now), demand[-1]),
                )
            )
            wanted = self.replicas_for(plan)
            since = 0 if wanted != target else since
            target = wanted
            state = {"slot": slot, "sum": 0.0, "looks": 0, "demand": demand, "since": since}
        state = {**state, "sum": state["sum"] + rate, "looks": state["looks"] + 1}
        return target, {**kept, _STATE: state}

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
