"""A policy that has warmed up has nothing left to compile."""

import os
import subprocess
import sys

DECIDES = """
import numpy as np
from numba.core.event import install_recorder
from serve_app.policy.loading import resolve_policy
from serve_app.policy.runner import deciders_of, warm_up
from tokenyard.routing.snapshot_table import SnapshotTable
from tokenyard.routing.types import Request

for scenario, name in {policies}:
    loaded = resolve_policy(name, scenario)
    warm_up(loaded)
    with install_recorder("numba:compile") as compiled:
        for decide in deciders_of(loaded.make(np.random.default_rng(0))):
            for num in {{loaded.card.num_replicas or 1, loaded.card.num_replicas or 5}}:
                decision = decide(Request(1.0, 200, 205.0, 4.0), SnapshotTable.idle(num))
                assert 0 <= decision.replica < num
    functions = [event.data["dispatcher"].py_func.__name__ for _, event in compiled.buffer]
    assert not functions, (name, functions)
"""


def test_nothing_is_left_to_compile_for_the_first_request(tmp_path):
    """In a fresh cache: a decision that compiles is interrupted, the next one too, and so on."""
    policies = [
        ("azure_code_slo", "champion"),
        ("azure_code_slo", "champion+sjf@5:1"),
        ("azure_code_mixed_gpus", "champion"),
        ("azure_code_mixed_gpus", "marginal_delay@0.5:2"),
        ("azure_code_mixed_gpus", "tuned_marginal_delay+boost@4:1"),
        ("azure_code_mixed_gpus", "marginal_in_order@1:0.5+wspt@60:1"),
        ("azure_code_mixed_gpus", "marginal_delay+late_last@2"),
        ("multi_turn_prefix", "champion"),
    ]
    subprocess.run(
        [sys.executable, "-c", DECIDES.format(policies=policies)],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        check=True,
    )
