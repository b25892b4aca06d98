"""Gateways of two releases change places under load, and lose nothing."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter

import pytest
from scripts import ROOT
from unit.raw_endpoint import RawCaller, raw_endpoints

from serve_app.http.free_port import free_port

pytestmark = pytest.mark.integration

WHOLE = b'{"choices":[{"index":0,"text":"ok","finish_reason":"stop"}]}'
BODY = b'{"model":"m","prompt":"a"}'
CALLERS = 8


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The tree of the commit before."""
    folder = tmp_path_factory.mktemp("before")
    tree = folder / "tree.zip"
    archive = ["git", "archive", f"--output={tree}", "HEAD~1", "serve_app", "tokenyard"]
    try:
        subprocess.run(archive, cwd=ROOT, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no commit before here: a clone with its history has it")
    shutil.unpack_archive(tree, folder)
    return folder


class Running:
    """A gateway in a process of its own."""

    @classmethod
    async def of(cls, tree, port, url):
        self = cls()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "tests/integration/one_gateway.py"), str(port), url,
            env=os.environ | {"PYTHONPATH": str(tree)}, cwd=tree, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert await self.process.stdout.readline() == b"listens\n"
        return self

    async def end(self):
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


class Load:
    """Callers that ask one request after another, each on a connection of its own."""

    def __init__(self, port):
        self._port = port
        self.heard = Counter()
        self.is_over = False

    async def run(self):
        await asyncio.gather(*(self._keep_asking() for _ in range(CALLERS)))

    async def more(self, num):
        until = self.heard.total() + num
        while self.heard.total() < until:
            await asyncio.sleep(0.01)

    async def _keep_asking(self):
        while not self.is_over:
            try:
                async with RawCaller.to(self._port) as caller:
                    status, _, body = await caller.ask(
                        b"/v1/completions", BODY, b"connection: close\r\n"
                    )
                self.heard[status if body == WHOLE else f"{status}: {body!r:.100}"] += 1
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.heard[type(error).__name__] += 1


def hands_over(tree):
    """Whether a tree's gateway leaves its port in peace; those before that lost a few requests."""
    return "def hand_over" in (tree / "serve_app/http/listener.py").read_text()


def test_no_request_is_lost_while_gateways_of_two_versions_change_places(before):
    trees = [ROOT, before, ROOT, before] if hands_over(before) else [ROOT, ROOT, before]

    async def test():
        async with raw_endpoints() as (endpoint,):
            endpoint.pieces, endpoint.gap_s = (WHOLE,), 0.02
            port = free_port()
            serving = await Running.of(trees[0], port, endpoint.url)
            load = Load(port)
            asking = asyncio.create_task(load.run())
            try:
                for tree in trees[1:]:
                    await load.more(100)
                    newer = await Running.of(tree, port, endpoint.url)
                    await load.more(100)
                    assert await serving.end() == 0
                    serving = newer
                await load.more(100)
            finally:
                load.is_over = True
                await asking
                await serving.end()
            assert load.heard.keys() == {200}, load.heard
            assert load.heard.total() >= 100 * (2 * len(trees) - 1)

    async def inside():
        async with asyncio.timeout(600):
            await test()

    asyncio.run(inside())
