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
    assert ray is None or not ray.is_initialized(), "a test of this module left Ray running"
