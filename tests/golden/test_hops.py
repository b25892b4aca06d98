"""A request, a simulation and a sweep pass through no more functions than they did.

Where a walk has become shorter its number is lowered with it. Of a chat request 17 functions learn
how long answers are and how fast endpoints.
"""

import os
import subprocess
import sys

import pytest
from golden import hops

MOST = {"chat_request": 193, "simulation": 84, "evaluation": 239, "sweep": 452}


def check(name, names):
    most = MOST[name]
    assert len(names) <= most, "\n".join([f"{name}: {len(names)} instead of {most}", *names])


@pytest.mark.parametrize("name", [name for name in MOST if name != "sweep"])
def test_a_walk_is_not_longer_than_it_was(name):
    check(name, list(hops.WALKS[name]().names))


@pytest.mark.integration
def test_a_sweep_is_not_longer_than_it_was():
    unset = ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (hops.ROOT, hops.ROOT / "tests")))
    command = [sys.executable, hops.__file__, "sweep"]
    ran = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    check("sweep", ran.stdout.splitlines()[1:])


def test_a_function_counts_once_and_what_it_holds_does_not():
    from tokenyard.statistics.intervals import holm

    walk = hops.Hops()
    with walk.installed(), walk.counted():
        for _ in range(2):
            holm([0.1, 0.2])
    (name,) = walk.names
    assert name.startswith("tokenyard/statistics/intervals.py:")
    assert name.endswith(" holm")
