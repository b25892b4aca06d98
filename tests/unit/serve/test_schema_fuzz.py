"""Every route, asked for what its schema allows and forbids by callers, admins and strangers."""

import asyncio
import threading
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from sizes import scaled
from unit.hostile_requests import ADMIN, USER
from unit.serve.test_bytes_through import WHOLE, a_site
from unit.serve.test_serve_gateway import FakePool
from unit.serve_builders import a_manager

from serve_app.cluster import Limits, load_cluster
from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.gateway.gateway import Gateway
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.free_port import free_port
from serve_app.http.listener import Listener

OPEN = {"/healthz", "/metrics"}
CHANGES = {"/v1/policy", "/v1/policies"}
KEYS = {"stranger": None, "caller": USER, "admin": ADMIN}


@asynccontextmanager
async def a_gateway():
    """Yield the port of a gateway before an endpoint and a pool of ours."""
    async with a_site(own=FakePool("own"), tokens=(USER, ADMIN)) as (port, _, endpoints):
        endpoints[0].pieces = (WHOLE,)
        yield port


@asynccontextmanager
async def a_decider():
    """Yield the port of a gateway without pools, which has regions."""
    gateway = Gateway(load_cluster("none"), a_manager(), {})
    api = create_gateway_api(gateway, EstimatingTokenizer(), Access(USER, ADMIN))
    listener, port = Listener(api, Limits()), free_port()
    await listener.start("127.0.0.1", port)
    try:
        yield port
    finally:
        await listener.stop()


@contextmanager
def served(site):
    """Have an event loop of its own serve a site, and yield its URL."""
    ready, ports = threading.Event(), []

    async def serve():
        ends = asyncio.Event()
        async with site() as port:
            ports.append((port, asyncio.get_running_loop(), ends))
            ready.set()
            await ends.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(300)
    port, loop, ends = ports[0]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()


@pytest.fixture(scope="module")
def operations():
    """Every operation of both kinds of gateway, with the URL that answers it."""
    with ExitStack() as stack:
        found = {}
        for site in (a_gateway, a_decider):
            url = stack.enter_context(served(site))
            schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
            for one in schema.get_all_operations():
                operation = one.ok()
                found.setdefault((operation.method, operation.path), (operation, url))
        yield found


def statuses_of(operation, url, headers):
    """Ask for one operation in many ways; return how it was answered, which is never by a 5xx."""
    found = set()

    @settings(
        max_examples=scaled(30), deadline=None, derandomize=True, database=None,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def no_failure(case):
        checks = [not_a_server_error]
        answer = case.call_and_validate(base_url=url, headers=headers, checks=checks, timeout=30)
        found.add(answer.status_code)

    no_failure()
    return found


@pytest.mark.parametrize("who", KEYS)
def test_no_route_fails_whoever_asks_and_whatever_for(operations, who):
    assert len(operations) >= 17, sorted(operations)
    headers = {} if KEYS[who] is None else {"authorization": f"Bearer {KEYS[who]}"}
    answered = {
        key for key, (operation, url) in operations.items()
        if min(statuses_of(operation, url, headers)) < 300
    }  # fmt: skip
    # No body or argument opens a route to who may not.
    paths = {path for _, path in answered}
    assert paths >= OPEN
    if who == "stranger":
        assert paths == OPEN
    elif who == "caller":
        assert not {path for method, path in answered if method != "get"} & CHANGES
