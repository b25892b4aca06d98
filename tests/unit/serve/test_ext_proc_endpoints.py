"""What the picker knows of endpoints: their health, and where their names lead."""

import asyncio

from unit.proxy_site import BODY, a_head, a_piece, an_answer, check, turns

from serve_app.engines.base import EngineStatus
from serve_app.ext_proc import addresses as addresses_module
from serve_app.ext_proc.addresses import Addresses
from serve_app.ext_proc.health import Health
from serve_app.ext_proc.protocol import (
    NOT_SERVING,
    PROCESS,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
)
from serve_app.ext_proc.server import ExtProcServer


def test_the_service_has_the_name_that_proxies_know():
    assert PROCESS == b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"


def test_a_gateway_that_ends_lets_nothing_in_and_says_so():
    async def test(site):
        server = ExtProcServer(site.site.app, site.gateway, hides_keys=False)
        for replica in site.gateway.table.replicas.values():
            replica.publish(EngineStatus(0, 0, 0.0, site.gateway.clock_s()))
        asked = Asked(server._health, server._health.watch)
        asked.say("readiness")
        assert asked.answers == [SERVING]
        site.gateway.draining = True
        server._health.tell()
        server._health.tell()
        assert asked.answers == [SERVING, NOT_SERVING]
        assert (await site.ask()).refusal[0] == 503
        server.resign()
        server.stop()

    check(test)


def test_subsets_may_name_endpoints_that_nobody_was_sent_to_before():
    async def test(site):
        server = ExtProcServer(site.site.app, site.gateway, hides_keys=False)
        site.gateway.backends["theirs"].change(["http://127.0.0.1:9"], adds=True)
        await server.start("127.0.0.1", 0)
        stream = await site.ask(subset=["127.0.0.1:9"])
        assert stream.placed == ["127.0.0.1:9"]
        stream.close()
        server.resign()
        server.stop()

    check(test, pool={"allowed": ["127.0.0.1"]})


class Asked:
    """A stream of a question after health."""

    def __init__(self, health, method):
        self.health, self.answers, self.status, self.is_open = health, [], None, True
        self.call = method(self)

    def send(self, *messages):
        self.answers += [HealthCheckResponse.FromString(message).status for message in messages]

    def end(self, status=0):
        self.status, self.is_open = status if self.is_open else self.status, False

    def say(self, service):
        self.call.take(HealthCheckRequest(service=service).SerializeToString())
        self.call.close()  # It has said all.


def test_who_watches_health_is_told_until_it_leaves():
    state = [True]
    health = Health(("ready",), lambda: state[0])
    for service, status, ended in (("ready", [SERVING], 0), ("liveness", [SERVING], 0)):
        checked = Asked(health, health.check)
        checked.say(service)
        assert (checked.answers, checked.status) == (status, ended)
    unknown = Asked(health, health.check)
    unknown.say("x")
    assert (unknown.answers, unknown.status) == ([], 5)
    watching = [Asked(health, health.watch) for _ in range(3)]
    for one, service in zip(watching, ("ready", "liveness", "x"), strict=True):
        one.say(service)
    state[0] = False
    health.tell()
    found = [[SERVING, NOT_SERVING], [SERVING], [SERVICE_UNKNOWN]]
    assert [one.answers for one in watching] == found
    for one in watching:
        one.is_open = False  # Its connection is gone.
        one.call.close()
    state[0] = True
    health.tell()
    assert [one.answers for one in watching] == found


class Names:
    """A server of names."""

    def __init__(self, monkeypatch, **known):
        self.known, self.asked = known, []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self.look_up)

    async def look_up(self, host, port, **options):
        host.encode("idna")  # As the loop's own does.
        self.asked.append(host)
        await asyncio.sleep(0.0)
        if (address := self.known.get(host)) is None:
            raise OSError("not known")
        return [(0, 0, 0, "", (address, port))]


def test_names_of_hosts_are_looked_up_when_they_are_picked(monkeypatch):
    async def test(site):
        names = Names(monkeypatch, one="10.0.0.1")
        stream = await site.ask()
        assert stream.placed == ["10.0.0.1:80"]
        again = await site.ask()
        assert (again.placed[0], names.asked.count("one")) == ("10.0.0.1:80", 1)
        stream.say(*an_answer(served="10.0.0.1:80"))
        again.close()
        await turns()
        assert (site.outcomes["stop"], site.outcomes["abort"]) == (1, 1)
        assert site.outcomes.get("failed", 0) <= 2  # The other has no address.

    check(test, places=("one:80", "other:80"), limits={"max_retries": 1})


def test_who_leaves_while_a_name_is_looked_up_has_left(monkeypatch):
    async def test(site):
        Names(monkeypatch, one="10.0.0.1")
        stream = site.stream(a_head(), a_piece(BODY))
        await site.until(lambda: site.gateway.in_flight)
        stream.close()
        await turns()
        assert (stream.sent, site.outcomes) == ([], {"abort": 1})

    check(test, places=("one:80",))


def test_addresses_follow_names_and_keep_the_last_where_a_look_up_fails(monkeypatch):
    async def run():
        monkeypatch.setattr(addresses_module, "_AGAIN_S", 0.0)
        long_name = f"http://{'x' * 64}.de"
        replicas = dict.fromkeys(["http://one", "https://[::1]", "http://10.1.1.1:8", long_name])
        addresses, names = Addresses(replicas.keys()), Names(monkeypatch)
        assert [*map(addresses.of, replicas)] == [None, "[::1]:443", "10.1.1.1:8", None]
        assert addresses.replicas_at(["", "None", "[::1]:443"]) == {"https://[::1]"}
        resolving = asyncio.create_task(addresses.resolve())
        await turns()
        assert addresses.of("http://one") is None
        for found in ("10.0.0.1", "fe80::1", None):
            names.known["one"] = found
            await turns(20)
        assert addresses.of("http://one") == "[fe80::1]:80"
        assert addresses.replicas_at(["[fe80::1]:80"]) == {"http://one"}
        del replicas["http://one"]
        await turns(20)
        names.asked.clear()
        assert addresses.replicas_at(["[fe80::1]:80"]) == frozenset()
        await turns(20)
        assert "one" not in names.asked
        resolving.cancel()

    asyncio.run(run())
