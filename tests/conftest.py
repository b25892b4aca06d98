"""What all tests share."""

import sys

import pytest
from hypothesis import settings

# The first call of a compiled function loads it, and machines that run tests are shared: how long
# one example takes says nothing.
settings.register_profile("tokenyard", deadline=None)
settings.load_profile("tokenyard")


@pytest.fixture(autouse=True, scope="module")
def _ends_its_ray():
    """A cluster that no test ends is ended by the interpreter, which then crashes at times."""
    yield
    ray = sys.modules.get("ray")
    left_running = ray is not None and ray.is_initialized()
    if left_running:
        ray.shutdown()
    assert not left_running, "a test of this module left Ray running"


@pytest.fixture(scope="module")
def rllib_cluster():
    """RLlib starts one, and does not end it, where there is none."""
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
