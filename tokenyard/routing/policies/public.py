"""The rules of public routers and their makers' knobs: one line each.

A rule is a row where its signals exist (`needs`). `NAME` has its makers' defaults, `tuned_NAME` the
knobs that `pipelines/tune_baselines.py` found for the scenario. docs/rules.md has the formulas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from tokenyard.routing.policies.aibrix import AibrixLoadBalance, AibrixPreble, AibrixPrefixCache
from tokenyard.routing.policies.cache_aware import SglangCacheAware, SmgSpill, VllmCacheAware
from tokenyard.routing.policies.context import PolicyContext
from tokenyard.routing.policies.delay import FilterDump, SedLinear
from tokenyard.routing.policies.dynamo import DynamoCost, DynamoLMetric
from tokenyard.routing.policies.llmd import LlmdBlend, LlmdPredictedLatency, LlmdSticky
from tokenyard.routing.policies.preble import LoadAware, PrebleE2
from tokenyard.routing.policies.prefill_work import LMetric, PendingPrefill, SMetric
from tokenyard.routing.policies.ray_serve import RayP2C, RayPrefixAffinity
from tokenyard.routing.types import RoutingPolicy

TUNED_PREFIX = "tuned_"

Grid = Mapping[str, tuple[float, ...]]
"""Knob of a rule to the values that are tried of it."""


class Needs(IntEnum):
    """What replicas must have for a rule to tell them apart; each includes those before it."""

    NOTHING = 0
    BATCHING = 1
    """Replicas that batch: prompts to compute, KV memory."""
    PREFIX_CACHE = 2
    """Replicas that cache prefixes: without, the rule is a plain rule under another name."""


@dataclass(frozen=True)
class PublicRule:
    """One rule: its class, what it needs, and what may be tuned of it."""

    rule: type
    needs: Needs
    grid: Grid = field(default_factory=dict)

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        """What its constructor takes: its knobs, and what a context may give (`make`)."""
        return inspect.signature(self.rule).parameters

    @property
    def defaults(self) -> Mapping[str, float]:
        """Return the makers' values of its knobs."""
        return {knob: float(self.takes[knob].default) for knob in self.grid}

    def make(self, context: PolicyContext, knobs: Mapping[str, float]) -> RoutingPolicy:
        """Make it afresh with these knobs; the others have their makers' defaults."""
        given = {name: getattr(context, name) for name in ("rng", "slo") if name in self.takes}
        made: RoutingPolicy = self.rule(**given, **knobs)
        return made


SERVICE_WEIGHTS = (
    0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 35.0,
)  # fmt: skip
BY_SPEED = {"by_speed": (0.0, 1.0)}
CACHE_AWARE = {
    "cache_threshold": (0.1, 0.3, 0.5, 0.8),
    "balance_abs_threshold": (2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    "balance_rel_threshold": (1.1, 1.5, 2.0),
}
PUBLIC_RULES: dict[str, PublicRule] = {
    "sed_linear": PublicRule(
        SedLinear,
        Needs.NOTHING,
        {"service_weight": SERVICE_WEIGHTS},
    ),
    "filter_dump": PublicRule(
        FilterDump,
        Needs.NOTHING,
        {"slo_share": (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 8.0)},
    ),
    "ray_p2c": PublicRule(RayP2C, Needs.NOTHING),
    "aibrix_load_balance": PublicRule(AibrixLoadBalance, Needs.NOTHING),
    "lmetric": PublicRule(LMetric, Needs.BATCHING, BY_SPEED),
    "pending_prefill": PublicRule(PendingPrefill, Needs.BATCHING, BY_SPEED),
    "dynamo_cost": PublicRule(
        DynamoCost,
        Needs.BATCHING,
        {
            **BY_SPEED,
            "prefill_load_scale": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
            "overlap_score_credit_decay": (0.0, 0.5, 1.0, 2.0),
            "decode_active_request_weight": (0.0, 10.0, 100.0, 1000.0),
        },
    ),
    "dynamo_lmetric": PublicRule(DynamoLMetric, Needs.BATCHING, BY_SPEED),
    "llmd_blend": PublicRule(
        LlmdBlend,
        Needs.BATCHING,
        {
            **BY_SPEED,
            "queue_weight": (0.0, 1.0, 2.0, 4.0, 8.0),
            "kv_weight": (0.0, 1.0, 2.0, 4.0),
            "prefix_weight": (0.0, 1.0, 3.0, 5.0, 10.0, 20.0),
        },
    ),
    "llmd_predicted_latency": PublicRule(
        LlmdPredictedLatency,
        Needs.BATCHING,
        {
            "most_headroom": (0.0, 1.0),
            "ttft_weight": (0.2, 0.5, 0.8, 1.0),
            "max_ttft_penalty_s": (0.5, 1.0, 2.0, 5.0),
            "epsilon": (0.0, 0.01),
        },
    ),
    "llmd_sticky": PublicRule(
        LlmdSticky,
        Needs.PREFIX_CACHE,
        {
            **BY_SPEED,
            "max_ttft_penalty_s": (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 18.0),
            "affinity_threshold": (0.3, 0.5, 0.8, 0.95),
        },
    ),
    "smetric": PublicRule(
        SMetric,
        Needs.PREFIX_CACHE,
        {"hit_ratio": (0.25, 0.5, 0.75), "slack": (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)},
    ),
    "vllm_cache_aware": PublicRule(VllmCacheAware, Needs.PREFIX_CACHE, CACHE_AWARE),
    "sglang_cache_aware": PublicRule(SglangCacheAware, Needs.PREFIX_CACHE, CACHE_AWARE),
    "smg_spill": PublicRule(SmgSpill, Needs.PREFIX_CACHE, CACHE_AWARE),
    "aibrix_prefix_cache": PublicRule(
        AibrixPrefixCache,
        Needs.PREFIX_CACHE,
        {
            "standard_deviation_factor": (0.0, 0.5, 1.0, 2.0, 3.0),
            "imbalance_min_gap": (2.0, 4.0, 8.0, 16.0),
        },
    ),
    "aibrix_preble": PublicRule(
        AibrixPreble, Needs.PREFIX_CACHE, {"window_s": (5.0, 15.0, 60.0, 180.0)}
    ),
    "preble_e2": PublicRule(PrebleE2, Needs.PREFIX_CACHE, {"window_s": (5.0, 15.0, 60.0, 180.0)}),
    "ray_prefix_affinity": PublicRule(
        RayPrefixAffinity,
        Needs.PREFIX_CACHE,
        {
            "imbalanced_threshold": (2.0, 4.0, 8.0, 16.0, 32.0),
            "match_rate_threshold": (0.1, 0.3, 0.5, 0.8),
        },
    ),
    "loadaware": PublicRule(
        LoadAware, Needs.PREFIX_CACHE, {"beta": (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)}
    ),
}
"""Name to rule."""

OF_PREFIXES = frozenset({"prefix_weight", "overlap_score_credit_decay", "max_ttft_penalty_s"})
"""Knobs that have no effect without a prefix cache."""
ALWAYS_TUNED = "sed_linear"
"""With its default it is `sed`, so the name itself stands for the tuned rule."""


def grid_of(name: str, has: Needs) -> Grid:
    """The knobs of a rule that have an effect where replicas have so much."""
    grid = PUBLIC_RULES[name].grid
    return {k: v for k, v in grid.items() if has == Needs.PREFIX_CACHE or k not in OF_PREFIXES}


def public_factories() -> dict[str, Callable[[PolicyContext], RoutingPolicy]]:
    """Return factories of every rule with its makers' defaults, and tuned if it has knobs."""
    factories: dict[str, Callable[[PolicyContext], RoutingPolicy]] = {}
    for name, rule in PUBLIC_RULES.items():
        if name == ALWAYS_TUNED:
            factories[name] = _tuned(name, rule)
            continue
        factories[name] = partial(rule.make, knobs={})
        if rule.grid:
            factories[TUNED_PREFIX + name] = _tuned(name, rule)
    return factories


def _tuned(name: str, rule: PublicRule) -> Callable[[PolicyContext], RoutingPolicy]:
    return lambda context: rule.make(context, context.rules().knobs.get(name, {}))


def is_tuned(name: str) -> bool:
    """Whether a name stands for a public rule with tuned knobs."""
    rest = name.removeprefix(TUNED_PREFIX)
    return name == ALWAYS_TUNED or (rest != name and rest in PUBLIC_RULES)


def draws(name: str) -> bool:
    """Whether a public rule, tuned or not, draws its choices or its ties."""
    rule = PUBLIC_RULES.get(name.removeprefix(TUNED_PREFIX))
    return rule is not None and "rng" in rule.takes


def needs_of(name: str) -> Needs:
    """What a baseline needs; those that are not public rules need nothing."""
    rule = PUBLIC_RULES.get(name.removeprefix(TUNED_PREFIX))
    return Needs.NOTHING if rule is None else rule.needs
