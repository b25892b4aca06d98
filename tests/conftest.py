"""What all tests share: their size, one Ray per process, and what a test may cost."""

import atexit
import gc
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings
from numba.core.event import install_timer
from sizes import is_thorough, register_profiles

from tokenyard.workload.paths import TRACE_FILES, data_folders

MOST_CPU_S = 15.0
"""CPU time of a test at every change: thrice what any takes, as machines differ."""
UNLIMITED = {"slow", "integration", "cluster", "engines"}
RAY_FIXTURES = {"ray_cluster", "own_ray"}
# Where Ray's workers find what tests let them run.
WORKER_PATH = [str(Path(__file__).parent), str(Path(__file__).parent / "integration")]

RECORDED_DATA = os.environ.get("TOKENYARD_DATA")

register_profiles()
settings.load_profile("fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What needs Ray is `integration`, whatever its folder, and all in one worker; so is a file."""
    for item in items:
        needs_ray = not RAY_FIXTURES.isdisjoint(item.fixturenames)
        if needs_ray:
            item.add_marker(pytest.mark.integration)
        item.add_marker(pytest.mark.xdist_group("ray" if needs_ray else item.path.stem))
    # It takes longest, so it begins first.
    items.sort(key=lambda item: RAY_FIXTURES.isdisjoint(item.fixturenames))


def pytest_collection_finish():
    """What is imported stays: to look through it for garbage takes a second, in any test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Recorded files are found by the tests that name them, and by no others: a clone has none."""
    wanted = [name for mark in item.iter_markers("recorded") for name in mark.args]
    if not wanted:
        os.environ["TOKENYARD_DATA"] = os.devnull
        return
    os.environ.pop("TOKENYARD_DATA", None)
    if RECORDED_DATA is not None:
        os.environ["TOKENYARD_DATA"] = RECORDED_DATA
    for name in wanted:
        files = TRACE_FILES.get(name, (name,))
        if not any((folder / file).exists() for folder in data_folders() for file in files):
            pytest.skip(f"{' or '.join(files)} was not found (TOKENYARD_DATA)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail what nobody should wait for at every change."""
    compiled_s = []
    started_s = time.process_time()
    with install_timer("numba:compile", compiled_s.append):
        result = yield
    spent_s = time.process_time() - started_s - sum(compiled_s)
    unlimited = is_thorough() or any(mark.name in UNLIMITED for mark in item.iter_markers())
    if spent_s > MOST_CPU_S and not unlimited:
        pytest.fail(f"{spent_s:.0f} s of CPU time: make it smaller, or mark it slow")
    return result


class SharedRay:
    """The Ray of this process: starting one takes seconds."""

    started = False
    session = None
    """Pytest's, at its end."""

    @staticmethod
    def runs():
        ray = sys.modules.get("ray")
        return ray is not None and ray.is_initialized()

    @classmethod
    def start(cls):
        import ray

        known = os.environ.get("PYTHONPATH")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(WORKER_PATH + [known] * bool(known)))
            # Ray gives its workers the lowest priority of all; other tests run beside them.
            patch.setenv("RAY_worker_niceness", "0")
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        cls.started = True

    @classmethod
    def end(cls):
        """A Ray that no test ends is ended by the interpreter, which then crashes at times."""
        if cls.runs():
            sys.modules["ray"].shutdown()
        cls.started = False


def pytest_sessionfinish(session):
    SharedRay.end()
    SharedRay.session = session
    # Left by a test that failed; what is there at the end is what ended the process.
    sys.__dict__.pop("last_value", None)


@atexit.register
def _leave_before_destructors():
    """End a process that has used Ray once Python has done all that it does at its end.

    Threads of Ray's gRPC outlive `ray.shutdown`, and run on while destructors of C++ take away what
    they use: one run in many ended as a segmentation fault after its last test had passed (as in
    grpc/grpc#11804). What is registered first is called last.
    """
    if "ray" in sys.modules and SharedRay.session is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(SharedRay.session.exitstatus or int(hasattr(sys, "last_value")))


@pytest.fixture(autouse=True, scope="module")
def _ends_its_ray():
    yield
    left_running = SharedRay.runs() and not SharedRay.started
    if left_running:
        SharedRay.end()
    assert not left_running, "a test of this module left Ray running"


@pytest.fixture(scope="module")
def ray_cluster():
    """A local Ray of four CPUs that the tests of a process share; it is left empty."""
    if not SharedRay.started:
        SharedRay.start()


@pytest.fixture(scope="module")
def own_ray():
    """For what starts a Ray of its own: here there is none."""
    SharedRay.end()
