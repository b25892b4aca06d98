"""Gateways, carriers and deciders of two releases change places under load, and lose nothing."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager

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
    async def begin(cls, tree, program, *arguments):
        self = cls()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "tests/integration" / program), *map(str, arguments),
            env=os.environ | {"PYTHONPATH": str(tree)}, cwd=tree, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    @classmethod
    async def of(cls, tree, port, url):
        self = await cls.begin(tree, "one_gateway.py", port, url)
        await self.says("listens")
        return self

    async def says(self, word):
        assert await self.process.stdout.readline() == f"{word}\n".encode()

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


def within(test, timeout_s=600):
    async def inside():
        async with asyncio.timeout(timeout_s):
            await test()

    asyncio.run(inside())


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

    within(test)


class Several:
    """Two carriers and their decider, under load, and whoever takes a place of theirs."""

    def __init__(self, url, folder):
        self._url, self._folder, self._port = url, folder, free_port()
        self.decider, self.carriers, self._begun = None, [], []
        self.load = Load(self._port)

    async def begin(self, role, tree, version=()):
        arguments = (role, self._port, self._url, self._folder, *version)
        one = await Running.begin(tree, "one_of_several.py", *arguments)
        self._begun.append(one)
        return one

    async def start(self, tree, version=()):
        self.decider = await self.begin("decider", tree, version)
        self.carriers = [await self.begin("carrier", tree, version) for _ in range(2)]
        for one in (self.decider, *self.carriers):
            await one.says("listens")

    async def replace_decider(self, tree, version=()):
        """As Ray Serve does: the one that takes its place begins while it drains."""
        newer = await self.begin("decider", tree, version)
        await newer.says("listens")
        assert await self.decider.end() == 0
        self.decider = newer

    async def replace_carrier(self, index, tree, version=()):
        newer = await self.begin("carrier", tree, version)
        assert await self.carriers[index].end() == 0
        await newer.says("listens")
        self.carriers[index] = newer

    async def kill(self):
        for one in self._begun:
            if one.process.returncode is None:
                one.process.kill()
                await one.process.wait()


@asynccontextmanager
async def several_under_load(folder, tree, version=()):
    async with raw_endpoints() as (endpoint,):
        endpoint.pieces, endpoint.gap_s = (WHOLE,), 0.2
        site = Several(endpoint.url, folder)
        asking = None
        try:
            await site.start(tree, version)
            asking = asyncio.create_task(site.load.run())
            await site.load.more(40)
            yield site
            await site.load.more(40)
        finally:
            site.load.is_over = True
            if asking is not None:
                await asking
            await site.kill()
        assert site.load.heard.keys() == {200}, site.load.heard


def test_no_request_is_lost_while_carriers_and_deciders_of_two_releases_change_places(
    before, tmp_path
):
    async def test():
        async with several_under_load(tmp_path, before) as site:
            # Deployed anew, and then the release before again.
            for newer in (ROOT, before):
                await site.replace_decider(newer)
                await site.load.more(40)
                for index in (0, 1):
                    await site.replace_carrier(index, newer)
                    await site.load.more(40)

    within(test)


def test_what_began_before_another_release_was_installed_is_replaced_one_after_another(tmp_path):
    async def test():
        async with several_under_load(tmp_path, ROOT, (98,)) as site:
            # Its decider is replaced first. Both carriers would be at once, if nobody saw to it.
            await site.replace_decider(ROOT, (99,))
            says = [asyncio.create_task(one.says("outdated")) for one in site.carriers]
            await asyncio.wait(says, return_when=asyncio.FIRST_COMPLETED)
            await site.load.more(40)
            assert sum(one.done() for one in says) == 1
            first = next(index for index, one in enumerate(says) if one.done())
            await site.replace_carrier(first, ROOT, (99,))
            await says[1 - first]
            await site.replace_carrier(1 - first, ROOT, (99,))
            await site.load.more(40)
            # Back to the release before, a carrier first.
            newer = await site.begin("carrier", ROOT, (98,))
            await site.decider.says("outdated")
            await site.replace_decider(ROOT, (98,))
            await newer.says("listens")
            await site.carriers[0].says("outdated")
            assert await site.carriers[0].end() == 0
            site.carriers[0] = newer

    within(test)
