"""The rules of public routers by the names that their makers give them.

`vllm-router cache_aware` means `vllm_cache_aware`; a router's name alone means what it does by
default, with equal weights for all servers. docs/rules.md has the same table.
"""

from __future__ import annotations

from collections.abc import Mapping

_BY_ROUTER: Mapping[str, Mapping[str, str]] = {
    "vllm-router": {
        "": "vllm_cache_aware", "cache_aware": "vllm_cache_aware", "round_robin": "round_robin",
        "random": "random", "power_of_two": "power_of_two",
    },
    "sglang": {
        "": "sglang_cache_aware", "cache_aware": "sglang_cache_aware",
        "round_robin": "round_robin", "random": "random", "power_of_two": "power_of_two",
        "lmetric": "lmetric",
    },
    "smg": {"": "smg_spill", "cache_aware": "smg_spill", "least_load": "least_connections"},
    "llm-d": {
        "": "llmd_blend", "prefix-cache-affinity": "llmd_sticky",
        "predicted-latency": "llmd_predicted_latency",
    },
    "dynamo": {
        "": "dynamo_cost", "kv": "dynamo_cost", "lmetric": "dynamo_lmetric",
        "round-robin": "round_robin", "random": "random",
    },
    "aibrix": {
        "": "random", "random": "random", "prefix-cache": "aibrix_prefix_cache",
        "prefix-cache-preble": "aibrix_preble", "load-balance": "aibrix_load_balance",
        "least-request": "least_connections",
    },
    "ray": {"": "ray_p2c", "pow-2": "ray_p2c", "prefix-affinity": "ray_prefix_affinity"},
    "production-stack": {
        "": "round_robin", "roundrobin": "round_robin", "loadaware": "loadaware",
    },
    "llumnix": {"": "pending_prefill"},
    "nginx": {
        "": "round_robin", "round_robin": "round_robin", "least_conn": "least_connections",
        "random": "random", "random two least_conn": "power_of_two",
    },
    "envoy": {
        "": "round_robin", "round_robin": "round_robin", "least_request": "power_of_two",
        "random": "random",
    },
    "haproxy": {
        "": "round_robin", "roundrobin": "round_robin", "leastconn": "least_connections",
        "random": "power_of_two",
    },
}  # fmt: skip
MAKERS_NAMES: Mapping[str, str] = {
    f"{router} {rule}".strip(): ours
    for router, rules in _BY_ROUTER.items()
    for rule, ours in rules.items()
}
"""Name of a router and its rule to the name of the rule here."""


def rule_of(name: str) -> str:
    """The rule that a maker's name means; any other name means itself."""
    return MAKERS_NAMES.get(" ".join(name.lower().split()), name)
