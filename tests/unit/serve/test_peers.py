"""Gateways that tell each other what they send."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.serve.test_serve_gateway import PROFILE, cluster_of

from serve_app.endpoints import PeerSettings
from serve_app.gateway.peers import Peers
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.http.free_port import free_port
from tokenyard.perf.online import AnswerMeter, PoolEstimator

NAMES = ("a", "b")
LOCAL = PeerSettings(listen="tcp://127.0.0.1:1", connect=())


class Site:
    """A gateway's table and its peers; what it tells is kept."""

    def __init__(self, settings=LOCAL, key=None):
        self.now_s = 100.0
        self.table = ReplicaTable((100.0, 10.0))
        for name in NAMES:
            self.table.add(name, "gpus", PROFILE, 16, 0.0)
        self.peers = Peers(settings, key, self.table, lambda: self.now_s)
        self.told = []
        self.peers._publish = self.told.append

    def send(self, replica_id, request_id, prompt):
        replica = self.table.replicas[replica_id]
        match_tokens = replica.match_tokens(prompt)
        replica.send(request_id, prompt, match_tokens, 10.0, self.now_s)
        self.peers.send(replica, request_id, prompt, match_tokens, 10.0)

    def begin(self, replica_id, request_id):
        self.table.replicas[replica_id].in_flight.receive(request_id, 1)
        self.peers.begin(request_id)

    def end(self, replica_id, request_id):
        self.table.replicas[replica_id].in_flight.close(request_id, self.now_s)
        self.peers.close(request_id)

    def tell(self):
        self.peers._flush()
        told, self.told[:] = [*self.told], []
        return told

    def state(self):
        flights = [self.table.replicas[name].in_flight for name in NAMES]
        return [(one.count, one.prefill_tokens, one.output_tokens) for one in flights]


def run(test):
    async def inside():
        test()

    asyncio.run(inside())


def test_what_one_has_sent_counts_at_the_other_with_its_cache():
    def test():
        here, there = Site(), Site()
        prompt = Prompt(list(range(64)))
        here.send("a", "r1", prompt)
        for message in here.tell():
            there.peers.take(message)
        assert there.state() == here.state()
        assert there.state()[0] == (1, 64.0, 10.0)
        assert there.table.replicas["a"].match_tokens(prompt) == 48
        assert there.table.replicas["b"].match_tokens(prompt) == 0
        here.begin("a", "r1")
        here.send("b", "r2", Prompt(list(range(10))))
        for message in here.tell():
            there.peers.take(message)
        assert there.state() == here.state()
        here.table.replicas["a"].in_flight.receive("r1", 7)
        here.peers.name_all()
        for message in here.tell():
            there.peers.take(message)
        assert there.state() == here.state()
        assert there.state()[0] == (1, 0.0, 3.0)
        here.end("a", "r1")
        here.end("b", "r2")
        for message in here.tell():
            there.peers.take(message)
        assert [count for count, *_ in there.state()] == [0, 0]

    run(test)


def test_what_one_learns_of_a_replica_the_other_knows():
    def test():
        here, there = Site(), Site()
        both = []
        for site in (here, there):
            meter = site.table.replicas["a"].in_flight.meter = AnswerMeter(PoolEstimator().add("a"))
            both.append(meter)
        clock_s = 0.0
        both[0]._clock_s = lambda: clock_s
        for number in range(200):
            name = f"r{number}"
            both[0].send(name, 100.0)
            clock_s += 0.04
            for token in range(40):
                both[0].receive(name, 1, token, 100.0, 100.0)
                clock_s += 0.03
            both[0].end(name)
            both[0].settle()
            here.peers.name_all()
            for message in here.tell():
                there.peers.take(message)
        batch = np.array([1.0, 0.0, 1.0, 120.0])
        believed = [float(meter.estimator.iteration @ batch) for meter in both]
        assert believed[0] == pytest.approx(0.03, rel=0.1)
        assert believed[1] == pytest.approx(believed[0], rel=1e-6)
        # What it heard it does not tell again, and nonsense is left out.
        assert not both[1].take_settled()
        before = both[1].estimator.num_observations
        for equation in ([1.0], ["x"] * 5, [float("nan")] * 6, [0.1, 1, 0, -1, 0], [1] * 9):
            here.peers._send_events([["learned", {"a": [equation], "nobody": [equation]}]])
            for message in here.tell():
                there.peers.take(message)
        assert both[1].estimator.num_observations <= before + 1

    run(test)


STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["send", "begin", "end"]), st.integers(0, 5)),
    max_size=30,
)


@settings(max_examples=scaled(200))
@given(steps=STEPS, lost=st.sets(st.integers(0, 60)), swapped=st.booleans())
def test_whatever_is_lost_the_counts_come_right(steps, lost, swapped):
    """Two sites; messages are lost, and later all that is open is named."""

    def test():
        sites = [Site(), Site()]
        opened = [{}, {}]
        number, num_sent = 0, 0

        def deliver():
            nonlocal number
            for site, other in zip(sites, reversed(sites), strict=True):
                for message in site.tell():
                    if number not in lost:
                        other.peers.take(message)
                    number += 1

        for where, step, which in steps:
            site, mine = sites[where], opened[where]
            if step == "send":
                num_sent += 1
                replica_id, name = NAMES[which % 2], f"{where}-{num_sent}"
                site.send(replica_id, name, Prompt([which] * (16 * which + 1)))
                mine[name] = replica_id
            elif mine:
                name = sorted(mine)[which % len(mine)]
                if step == "begin":
                    site.begin(mine[name], name)
                else:
                    site.end(mine.pop(name), name)
            deliver()
            for each in sites:
                each.now_s += 0.1
        lost.clear()
        for each in sites:
            each.now_s += 1.5
            each.peers.name_all()
        deliver()
        known = [sum(count for count, *_ in site.state()) for site in sites]
        num_open = sum(map(len, opened))
        # What a peer never heard of is the only thing that may be missing.
        assert all(
            len(mine) <= count <= num_open for mine, count in zip(opened, known, strict=True)
        )
        for site, mine in zip(sites, opened, strict=True):
            for name in sorted(mine):
                site.end(mine.pop(name), name)
        deliver()
        assert [count for site in sites for count, *_ in site.state()] == [0, 0, 0, 0]

    run(test)


def test_a_peer_that_says_nothing_has_nothing_open():
    def test():
        here, there = Site(), Site()
        here.send("a", "r1", Prompt([1, 2, 3]))
        for message in here.tell():
            there.peers.take(message)
        there.now_s += 1.0
        there.peers.name_all()
        assert (there.state()[0][0], there.peers.num_heard) == (1, 1)
        there.now_s += 2.0
        there.peers.name_all()
        assert (there.state()[0][0], there.peers.num_heard) == (0, 0)

    run(test)


def signed(site, text):
    return site.peers._sign(text) + text


def test_what_is_no_peers_message_is_left_out():
    def test():
        here, there = Site(key="secret"), Site(key="another")
        here.send("a", "r1", Prompt([1]))
        [message] = here.tell()
        there.peers.take(message)
        there.peers.take(b"")
        there.peers.take(message[:-1] + b"x")
        own = json.dumps([there.peers._name, [["send", "x", "a", 1, 1, 0, 1.0, []]]]).encode()
        there.peers.take(signed(there, own))
        odd = [
            b"", b"[]", b"{}", b'["p", 5]', b'["p", [["send"]]]', b'["p", [["send", "x", "a"]]]',
            b'["p", [["send", "x", "a", "y", 1, 0, 1.0, []]]]', b'["p", [["end"]]]',
            b'["p", [["send", "x", "nowhere", 1, 1, 0, 1.0, []]]]', b'["p", [["all", 5]]]',
            b'["p", [["send", "x", "a", 1, 1, 0, 1.0, [1e400]]]]', b'["p", [[]]]', b"\xff",
            b"[" * 100_000,
        ]  # fmt: skip
        for text in odd:
            there.peers.take(signed(there, text))
        assert there.state() == Site().state()

    run(test)


def test_an_address_that_is_taken_is_said_in_a_sentence():
    async def test():
        port = free_port()
        settings = PeerSettings(listen=f"tcp://127.0.0.1:{port}", connect=())
        first, second = Site(settings), Site(settings)
        first.peers.start()
        try:
            with pytest.raises(OSError, match=f"gateway.peers: tcp://127.0.0.1:{port}"):
                second.peers.start()
        finally:
            first.peers.stop()
            second.peers.stop()

    asyncio.run(test())


def test_others_machines_need_a_secret_and_sessions_one_gateway():
    far = PeerSettings(listen="tcp://0.0.0.0:9005", connect=("tcp://10.0.0.2:9005",))
    with pytest.raises(ValueError, match="TOKENYARD_PEERS_KEY"):
        Site(far)
    Site(far, "secret")
    pools = [{"name": "x", "kind": "external", "model": "m", "endpoints": ["http://127.0.0.1:1"]}]
    with pytest.raises(ValueError, match="no peers"):
        cluster_of(pools, sessions={}, gateway={"peers": {"listen": "tcp://*:1", "connect": []}})


def test_over_sockets_they_find_each_other_in_any_order_and_part():
    ports = [free_port() for _ in "12"]
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]

    async def until(is_so):
        for _ in range(500):
            if is_so():
                return
            await asyncio.sleep(0.01)
        raise AssertionError

    async def test():
        sites = [Site(PeerSettings(listen=one, connect=addresses)) for one in addresses]
        here, there = sites
        here.peers.start()
        here.send("a", "early", Prompt([1, 2]))
        there.peers.start()
        await until(lambda: here.peers.num_heard == there.peers.num_heard == 1)
        here.send("b", "late", Prompt(np.arange(40).tolist()))
        await until(lambda: there.state()[1][0] == 1)
        here.peers.stop()
        await until(lambda: there.state()[1][0] == 0 or there.peers.num_heard == 0)
        there.peers.stop()

    asyncio.run(test())
