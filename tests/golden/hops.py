"""How many of the project's functions a request, a simulation and a sweep pass through.

    PYTHONPATH=.:tests python tests/golden/hops.py [WALK ...]

prints the functions of each walk in the order in which they are first entered. A function counts
once however often it is called; comprehensions and class bodies are part of what holds them; of
compiled functions only those count that Python calls. What is cached is warm: a walk is done once
before it is counted, but for the sweep, which needs a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(
    f"{ROOT / name}{os.sep}"
    for name in ("tokenyard", "serve_app", "tune_configs", "pipelines", "envs")
)
SCENARIO, RULE = "stale_signals", "marginal_delay"
INNER = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}


class Hops:
    """Own functions that were entered, in this thread and in those that begin meanwhile."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """File, line and name of each, in order."""
        self._known: set[CodeType] = set()
        self._counts = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is entered inside."""
        self._counts = True
        gc.disable()  # Gateways, and what is left of them, look at how long collections take.
        try:
            yield
        finally:
            gc.enable()
            self._counts = False

    @contextmanager
    def installed(self) -> Iterator[Hops]:
        """Be told of calls, in threads that begin inside, too."""
        before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield self
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not self._counts or event != "call" or code in self._known:
            return
        self._known.add(code)
        if code.co_filename.startswith(PACKAGES) and is_function(code):
            file = code.co_filename.removeprefix(f"{ROOT}{os.sep}")
            self.names[f"{file}:{code.co_firstlineno} {code.co_qualname}"] = None


def is_function(code: CodeType) -> bool:
    """Whether code is of a function. That of a compiled one says no more than where it is from."""
    if code.co_name in INNER:
        return False
    return bool(code.co_flags & inspect.CO_OPTIMIZED) or "__qualname__" not in code.co_names


def chat_request() -> Hops:
    """A streamed chat completion, through a gateway of one process before an endpoint."""
    from unit.raw_endpoint import RawCaller
    from unit.serve.test_bytes_through import CHAT, END, STREAM, a_site, paced

    from serve_app.gateway import history

    async def inside(hops: Hops) -> None:
        # However slow the machine is, no rule stands in for the policy.
        site = a_site(circuit_breaker={"budget_s": 1.0})
        async with site as (port, gateway, (endpoint,)), RawCaller.to(port) as caller:

            async def ask() -> None:
                status, _, answer = await caller.ask(CHAT, STREAM)
                assert (status, answer.endswith(END[-1])) == (200, True)
                while gateway.in_flight:
                    await asyncio.sleep(0)
                for _ in range(100):  # What is left to do once it is answered.
                    await asyncio.sleep(0)

            paced(endpoint, *END)
            await ask()
            with hops.counted():
                await ask()

    # No new bin of the console's history begins between the two requests.
    with patch.object(history, "BIN_S", 1e9):
        asyncio.run(inside(Hops()))  # Compiles what a policy calls.
        with Hops().installed() as hops:
            asyncio.run(inside(hops))
    return hops


def simulation() -> Hops:
    """A stream of requests to a fleet, from the name of a rule to the kernel."""
    from tokenyard.evaluation import run_candidates
    from tokenyard.routing.problem import PROBLEM

    scenario = PROBLEM.load_scenario(SCENARIO).model_copy(update={"requests_per_stream": 50})
    streams = PROBLEM.streams(scenario, "evaluation", 1, 0)

    def run() -> None:
        run_candidates([PROBLEM.candidate(scenario, RULE)], scenario, streams, 0)

    return second(run)


def evaluation() -> Hops:
    """The command `evaluate`, from its arguments to its table."""
    from pipelines import evaluate

    args = evaluate.Args(
        scenario=SCENARIO, source="synthetic", policies=RULE, baseline=RULE, streams=1
    )

    def run() -> None:
        with redirect_stdout(io.StringIO()):
            evaluate.main(args)

    return second(run)


def second(run: Callable[[], None]) -> Hops:
    """Count what is done the second time."""
    run()
    with Hops().installed() as hops, hops.counted():
        run()
    return hops


def sweep() -> Hops:
    """A sweep of four trials that learn nothing, in the process that starts them and compares."""
    from pipelines import sweep as command

    with tempfile.TemporaryDirectory() as folder, Hops().installed() as hops:
        args = command.Args("integration.toy_sweeps:tiny", "hops", storage=folder)
        # Else comparisons run in processes of their own, on a machine with more CPUs than one.
        alone = patch("os.cpu_count", return_value=1)
        with alone, hops.counted(), redirect_stdout(io.StringIO()):
            try:
                command.main(args)
            except SystemExit as end:
                if end.code:
                    raise
    return hops


WALKS: dict[str, Callable[[], Hops]] = {
    walk.__name__: walk for walk in (chat_request, simulation, evaluation, sweep)
}


if __name__ == "__main__":
    # A champion is held to recorded traffic, too, where there is some.
    os.environ["TOKENYARD_DATA"] = os.devnull
    for name in sys.argv[1:] or WALKS:
        names = WALKS[name]().names
        sys.stdout.write("\n".join([f"{name}: {len(names)}", *names]) + "\n")
