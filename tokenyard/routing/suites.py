"""Scenarios that are evaluated together."""

from __future__ import annotations

SUITES: dict[str, tuple[str, ...]] = {
    "paper": ("nominal", "high_load"),
    "routing": ("poisson_085", "bursty_serial", "conversation"),
    "fleet": (
        "azure_code_mixed_gpus", "azure_code_mixed_gpus_085", "azure_code_slo",
        "conversation_measured_gpus", "conversation_mixed_gpus", "multi_turn_measured_gpus",
        "multi_turn_prefix", "two_classes_slo", "churn", "stale_signals",
    ),
    # What a router may meet: loads, bursts, kinds and numbers of servers, and, where only replicas
    # that batch know them, churn, stale signals and SLOs that differ.
    "regimes": (
        "nominal", "high_load", "slotted", "homogeneous", "two_speeds", "three_speeds",
        "thirty_two", "poisson_050", "poisson_070", "poisson_085", "poisson_095", "bursty_serial",
        "conversation", "churn", "stale_signals", "two_classes_slo",
    ),
}  # fmt: skip
