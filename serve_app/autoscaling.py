"""An allocation policy as a Ray Serve autoscaling policy, for any deployment of equal replicas.

A deployment names it in its configuration:

    autoscaling_config:
      min_replicas: 1
      max_replicas: 8
      policy:
        policy_function: serve_app.autoscaling:PlannedReplicas
        policy_kwargs: {scenario: a100x8_13b, tensor_parallel: 2, policy: champion}
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from serve_app.allocation.replica_count import Looks, ReplicaPlanner

_STATE = "tokenyard"


class PlannedReplicas(ReplicaPlanner):
    """Decides the number of replicas once per slot of an allocation scenario."""

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and what to remember: Serve keeps it."""
        kept = dict(ctx.policy_state)
        target, looks = self.look(
            kept.get(_STATE) or Looks(),
            ctx.current_time or 0.0,
            float(ctx.total_num_requests),
            ctx.current_num_replicas,
            ctx.target_num_replicas,
        )
        return target, {**kept, _STATE: looks}
