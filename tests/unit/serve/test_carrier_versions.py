"""Carriers and deciders of two releases: both say why they part, and who is to be replaced."""

import asyncio
import json
from dataclasses import replace

import pytest
from pydantic import ValidationError
from unit.raw_endpoint import RawCaller
from unit.serve.test_bytes_through import CHAT, WHOLE
from unit.serve.test_serve_carriers import BODY, a_site, run, until

from serve_app.gateway import carrier as carrier_module
from serve_app.gateway import decider as decider_module
from serve_app.gateway.carrier_wire import FrameKind, FrameProtocol, Hello

OWN = Hello()
EARLIER = replace(OWN, wire_version=1, release="0.0.9", began_s=OWN.began_s - 60.0)
LATER = replace(OWN, wire_version=OWN.wire_version + 1, release="0.2.0", began_s=OWN.began_s + 60.0)


async def ask(site, index=0):
    site.endpoints[0].pieces = (WHOLE,)
    async with RawCaller.to(site.ports[index]) as caller:
        return (await caller.ask(CHAT, BODY))[0]


async def replace_decider(site, hello=OWN):
    await site.kill_decider()
    await until(lambda: all(one._link is None for one in site.carriers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decider_module, "Hello", lambda: hello)
        await site.decide()


@pytest.mark.parametrize("hello", [OWN, EARLIER, LATER, replace(OWN, carried_alone=7)])
def test_a_hello_is_read_as_it_was_written(hello):
    assert Hello.read(hello.write()) == hello


def test_a_later_release_may_say_more():
    said = json.loads(OWN.write()) | {"compression": "zstd"}
    assert Hello.read(json.dumps(said).encode()) == OWN


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"[]", b"3", b"\xff", b'{"pid": "1"}', b'{"wire_version": 2.0}',
     b'{"wire_version": true}', b'{"is_next": 1}', b'{"began_s": null}'],
)  # fmt: skip
def test_what_is_no_hello_is_refused(payload):
    with pytest.raises(ValidationError):
        Hello.read(payload)


@pytest.mark.parametrize(
    ("carrier", "decider", "older"),
    [(EARLIER, OWN, "carrier"), (OWN, EARLIER, "decider"), (LATER, OWN, "decider"),
     (OWN, LATER, "carrier")],
)  # fmt: skip
def test_the_one_that_began_first_has_to_be_replaced(carrier, decider, older):
    # Also where somebody has gone back to the release before: its version is the smaller one.
    reason = carrier.refusal(decider)
    assert f"the {older} began first and has to be replaced" in reason
    assert carrier.release in reason
    assert decider.release in reason


def test_releases_with_the_same_wire_work_together():
    assert replace(OWN, release="9.9").refusal(OWN) is None


def test_carriers_of_an_earlier_release_are_replaced_one_after_another(caplog):
    async def test(site):
        for number, one in enumerate(site.carriers):
            one.hello = replace(EARLIER, pid=number)
        await replace_decider(site)
        await until(lambda: any(one.outdated for one in site.carriers))
        await asyncio.sleep(0.5)
        first, second = sorted(site.carriers, key=lambda one: one.outdated is None)
        assert (first.outdated is None, second.outdated is None) == (False, True)
        assert site.decider.outdated is None
        # Both go on alone until then.
        assert [await ask(site, index) for index in (0, 1)] == [200, 200]
        await site.carry()
        await until(lambda: second.outdated is not None)
        assert site.value("carriers") == 1
        assert await ask(site, 2) == 200

    run(test)
    said = [one.message for one in caplog.records if "began first" in one.message]
    # Of each carrier it says so itself, and so does the decider: once, however often they try.
    assert len(said) == 4, said
    assert all("the carrier began first" in one for one in said)


def test_a_decider_of_an_earlier_release_is_replaced_and_nothing_is_lost(caplog):
    async def test(site):
        await replace_decider(site, EARLIER)
        await until(lambda: site.decider.outdated is not None)
        assert "the decider began first" in site.decider.outdated
        assert [one.outdated for one in site.carriers] == [None, None]
        assert [await ask(site, index) for index in (0, 1)] == [200, 200]
        await replace_decider(site)
        await until(lambda: site.value("carriers") == 2)
        assert site.value("carried_alone_total") == 2

    run(test)
    assert sum("began first" in one.message for one in caplog.records) >= 2


def test_a_decider_that_says_nothing_holds_nobody_up(monkeypatch, caplog):
    monkeypatch.setattr(carrier_module, "_SILENT_S", 0.2)

    async def test(site):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decider_module._Link, "take", lambda *_: None)
            await replace_decider(site)
            await until(lambda: "does not say who it is" in caplog.text)
            assert await ask(site) == 200
        await until(lambda: site.value("carriers") == 2)

    run(test)


def test_nobody_asks_before_a_hello(caplog):
    async def test():
        async with a_site(num_carriers=0) as site:
            heard = []

            class Caller(FrameProtocol):
                def take(self, kind, number, payload):
                    heard.append(kind)

                def lost(self):
                    heard.append("lost")

            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(Caller, site.decider.path)
            link.send(FrameKind.ASK, 1, b"\x00\x00")
            link.send(FrameKind.PING, 0)
            await asyncio.sleep(0.05)
            assert (heard, site.gateway.in_flight) == ([], 0)
            link.send(FrameKind.HELLO, 0, b'{"pid": "x"}')
            await until(lambda: heard == ["lost"])
            assert site.value("carriers") == 0

    asyncio.run(test())
    assert "a frame of kind 1 between carrier and decider" in caplog.text
