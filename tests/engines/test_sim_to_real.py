"""Simulator and client agree which of two policies is better, where no model paces engines."""

import os
from pathlib import Path

import pytest
from engines.real_engines import ENVIRONMENTS
from engines.sim_to_real import Args, study
from rich.console import Console

pytestmark = pytest.mark.engines


def test_two_servers_of_unequal_speed_are_predicted_to_be_better_routed_by_cost():
    if not (ENVIRONMENTS / "llamacpp" / ".installed").exists():
        pytest.skip(f"no llamacpp in {ENVIRONMENTS}: `make engines-real`")
    groups = Path("/sys/fs/cgroup")
    if not any(os.access(folder, os.W_OK) for folder in (groups / "cpu", groups)):
        pytest.skip("no right to make a cgroup")
    policies = ("round_robin", "marginal_delay+sjf@60")
    args = Args(
        loads=(0.6,), policies=policies, repeats=2, duration_s=20.0, learn_s=80.0,
        engines=("llamacpp-0", "llamacpp-1"),
    )  # fmt: skip
    rows = {row["policy"]: row for row in study(args, Console(quiet=True))}
    for key in ("mean_response_s", "simulated_mean_response_s"):
        slower, faster = (rows[policy][key] for policy in policies)
        assert faster < slower
