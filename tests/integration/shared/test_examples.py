"""Every example runs as it is, and prints what its docstring says."""

from __future__ import annotations

import ast
import asyncio
import re
import runpy
import sys
import threading
from pathlib import Path

import pytest
from unit.stub_endpoint import stubs

EXAMPLES = Path(__file__).parents[3] / "examples"
LONGEST = 100
PRINTED = {
    "allocate": r"this allocator: [\d.]+ \$/h.*\nautoscaler_tuned: .*\nplanner: ",
    "evaluate_trace": r"(?s)5 x 1000 requests, recorded trace.*difference to least_connections",
    "gym_loop": r"random: .*\nround robin: .*\nleast work: mean reward -0\.\d",
    "my_rule": r"(?s)my_rule: the rule of .*difference to sed.* my_rule +-\d",
}
"""What an example prints that starts nothing."""
PRINTED_WITH_PROCESSES = {
    "decision_log": r"50 decisions of sed@[\s\S]*the last went to ",
    "serve_endpoints": r'answer: 200 .*"text":"ok".*\nendpoint: http.*\nendpoint: http',
}
PRINTED_ON_RAY = {
    "ppo": r"iteration 0: mean return -\d.*\niteration 1: mean return -\d",
    "ray_serve_router": r"requests by replica: \[\d, \d\]",
}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def printed(name, monkeypatch, capfd, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capfd.readouterr().out


@pytest.fixture
def endpoints():
    """Endpoints that answer, in a thread of their own."""
    loop, ready, urls = asyncio.new_event_loop(), threading.Event(), []

    async def serve():
        async with stubs(2) as served:
            urls.extend(one.url for one in served)
            ready.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    yield urls
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_each_is_short_says_how_it_is_run_and_is_listed_and_tested():
    tested = [*PRINTED, *PRINTED_WITH_PROCESSES, *PRINTED_ON_RAY]
    assert sorted(tested) == NAMES
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == NAMES
    for name in NAMES:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert len(text.splitlines()) <= LONGEST, name
        said = ast.get_docstring(ast.parse(text))
        assert f"python examples/{name}.py" in said
        assert "Expect " in said


@pytest.mark.parametrize("name", PRINTED)
def test_one_that_starts_nothing(name, monkeypatch, capfd):
    assert re.search(PRINTED[name], printed(name, monkeypatch, capfd))


@pytest.mark.smoke
@pytest.mark.integration
@pytest.mark.parametrize("name", PRINTED_WITH_PROCESSES)
def test_one_that_starts_a_gateway(name, endpoints, monkeypatch, capfd):
    arguments = ["tiny", *endpoints] if name == "serve_endpoints" else []
    assert re.search(PRINTED_WITH_PROCESSES[name], printed(name, monkeypatch, capfd, *arguments))


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:.*already in registry")  # RLlib names all of its own alike.
@pytest.mark.parametrize("name", PRINTED_ON_RAY)
def test_one_on_ray(name, ray_cluster, monkeypatch, capfd):
    assert re.search(PRINTED_ON_RAY[name], printed(name, monkeypatch, capfd))
