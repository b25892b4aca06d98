"""Parameters of hand rules that are searched for, not derived: one small file per scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Annotated, Self

from pydantic import Field, model_validator

from tokenyard.config import FrozenModel
from tokenyard.routing import observation as ob


class FleetRules(FrozenModel):
    """Parameters of least marginal delay."""

    wait_weight: Annotated[float, Field(ge=0)] = 1.0
    """Tuned marginal delay: weight of the request's own wait."""
    others_weight: Annotated[float, Field(ge=0)] = 1.0
    """Tuned marginal delay: weight of what the others are delayed by."""

    @property
    def marginal_weights(self) -> tuple[float, ...]:
        """Tuned marginal delay as weights of `scores.linear.marginal_scores`."""
        weights = [0.0] * ob.NUM_MARGINAL_WEIGHTS
        weights[ob.MARGINAL_WAIT] = self.wait_weight - 1.0
        weights[ob.MARGINAL_OTHERS] = self.others_weight - 1.0
        return tuple(weights)

    @property
    def in_order_weights(self) -> tuple[float, ...]:
        """The placement that knows the order as weights of `scores.linear.marginal_scores`."""
        weights = list(self.marginal_weights)
        weights[ob.MARGINAL_OVERTAKEN] = -self.wait_weight
        weights[ob.MARGINAL_SPARED] = -self.others_weight
        return tuple(weights)


Grids = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Values tried of every field of `FleetRules`, under the rule that it belongs to."""

FLEET_GRIDS: Grids = {
    "marginal_delay": {},
    "tuned_marginal_delay": {
        "others_weight": (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0),
        "wait_weight": (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0),
    },
}


class TunedRules(FrozenModel):
    """What the tuned rules of one scenario were found to do best with."""

    scenario: str
    reserve_above_tokens: Annotated[float, Field(gt=0)]
    """SED-reserve: requests above this size are barred from the slowest replica."""
    dump_replica: Annotated[int, Field(ge=0)]
    """SED-dump: index of the replica that takes certain SLO violations."""
    sita_cuts_tokens: tuple[float, ...]
    """SITA: upper ends of all size intervals but the last, increasing."""
    sita_replicas: Annotated[tuple[int, ...], Field(min_length=1)]
    """SITA: index of the replica of each interval; each replica once."""
    fleet: FleetRules = FleetRules()
    knobs: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Knobs of the public rules that were tuned, by rule; the others have their makers' values."""
    orders: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Knobs of orders that were tuned, by the name of placement and order."""
    order_scores: dict[str, float] = Field(default_factory=dict)
    """Score of each of these on the training streams."""
    scores: dict[str, float] = Field(default_factory=dict)
    """Score of each rule on the training streams it was tuned on, with untuned ones beside them."""
    tuned_on: str = ""
    """The training streams, in words."""
    load_scores: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Score at each load of the gate, by rule: of those that no other certainly beats at the
    scenario's own load (`tokenyard.routing.tuning.tune_loads`)."""
    load_scores_on: str = ""
    """The training streams of these, in words."""

    @model_validator(mode="after")
    def _one_replica_per_interval(self) -> Self:
        if len(self.sita_cuts_tokens) != self.num_replicas - 1:
            raise ValueError("sita_cuts_tokens must be one fewer than sita_replicas")
        if list(self.sita_cuts_tokens) != sorted(self.sita_cuts_tokens):
            raise ValueError(f"sita_cuts_tokens {self.sita_cuts_tokens} must not decrease")
        if sorted(self.sita_replicas) != list(range(self.num_replicas)):
            raise ValueError(f"sita_replicas {self.sita_replicas} must name each replica once")
        if self.dump_replica >= self.num_replicas:
            raise ValueError(f"dump_replica {self.dump_replica} is not 0..{self.num_replicas - 1}")
        return self

    def best_over_loads(self, may_be: Callable[[str], bool] = lambda rule: True) -> str | None:
        """Rule of `load_scores` with the smallest worst regret over the loads; None: there is none.

        Regret at a load is what the score lacks of the best one there, as a share of that.

        Args:
            may_be: Which rules count; the best of a load may be any.
        """
        scores = self.load_scores
        loads = next(iter(scores.values()), {})
        best = {load: max(of_rule[load] for of_rule in scores.values()) for load in loads}

        def worst_regret(rule: str) -> float:
            return max((best[load] - scores[rule][load]) / abs(best[load]) for load in loads)

        return min(filter(may_be, scores), key=worst_regret, default=None)

    @property
    def num_replicas(self) -> int:
        """How many replicas the rules were tuned for."""
        return len(self.sita_replicas)


def load_tuned(scenario_name: str) -> TunedRules:
    """Read the tuned rules that ship for a scenario.

    Raises:
        ValueError: There are none; the text names the command that makes them.
    """
    file = (
        resources.files("tokenyard") / "scenarios" / "tuned" / "routing" / f"{scenario_name}.json"
    )
    if not file.is_file():
        raise ValueError(
            f"no tuned rules for scenario {scenario_name!r}; make them with "
            f"`python pipelines/tune_baselines.py --scenario {scenario_name}`"
        )
    return TunedRules.model_validate_json(file.read_text(encoding="utf-8"))


def find_tuned(scenario_name: str) -> TunedRules | None:
    """Read the tuned rules that ship for a scenario; None: there are none."""
    try:
        return load_tuned(scenario_name)
    except ValueError:
        return None
