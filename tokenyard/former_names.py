"""Names of earlier releases. They are refused, and the error says the name that counts now."""

from __future__ import annotations

from collections.abc import Mapping

FILES: Mapping[str, str] = {
    "azure_code_promises": "azure_code_slo",
    "rehearsal": "emulated",
    "rehearsal_l4x4": "emulated_l4x4",
}
"""Scenarios, clusters and models that ship."""
KEYS: Mapping[str, str] = {
    "promise": "slo",
    "missed": "violations",
    "missed_usd": "violation_usd",
    "rehearses": "emulates",
    "slow_down": "time_scale",
    "trust": "circuit_breaker",
}
"""Keys of scenario files, cluster files and policy files."""
RULES: Mapping[str, str] = {
    "prefix_affinity": "vllm_cache_aware",
    "sticky_until_saturated": "llmd_sticky",
    "kv_cost": "dynamo_cost",
    "weighted_scorers": "llmd_blend",
    "generic": "marginal_delay+sjf@60",
}
"""Rules of routing; the last was a learned formula, and this rule ships in its place."""
ENGINES: Mapping[str, str] = {"gang": "sharded"}
"""Values of `engine` in cluster files."""


def hint(name: str, former: Mapping[str, str]) -> str:
    """What to add to an error about `name`: nothing, or the name that it has now."""
    return f"; {name} is called {former[name]} now" if name in former else ""
