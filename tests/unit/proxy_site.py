"""A gateway that picks for a proxy, and the proxy's side of the streams, without a network."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pyarrow.parquet as pq
from unit.serve.test_serve_external import PROFILE

from serve_app.cluster import Cluster
from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.ext_proc.addresses import Addresses
from serve_app.ext_proc.exchange import Exchange, Site
from serve_app.ext_proc.protocol import (
    FULL_DUPLEX_STREAMED,
    PART,
    ProcessingRequest,
    ProcessingResponse,
)
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.rate_limits import RateLimits
from serve_app.http import errors
from serve_app.http.auth import Access
from serve_app.http.data_path import DataPath
from serve_app.http.intake import Intake, PendingBodies
from serve_app.policy.manager import PolicyManager

A, B, C = PLACES = ("127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003")
CHAT = "/v1/chat/completions"
FIELDS = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
BODY = json.dumps(FIELDS).encode()
DESTINATION, DECISION = "x-gateway-destination-endpoint", "x-gateway-decision-id"
EVENTS = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}
WHOLE = b'{"id":"a","usage":{"prompt_tokens":2,"completion_tokens":3}}'


def a_token(text="a", reason=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


STREAM = (a_token(), a_token(), a_token("", "stop"), b"data: [DONE]\n\n")


def pairs_of(headers):
    pairs = headers.items() if isinstance(headers, dict) else headers
    encoded = [[x if isinstance(x, bytes) else x.encode() for x in pair] for pair in pairs]
    return {"headers": [{"key": name, "raw_value": value} for name, value in encoded]}


def a_head(
    headers=(), method="POST", path=CHAT, ends=False, mode=FULL_DUPLEX_STREAMED,
    answer_mode=FULL_DUPLEX_STREAMED, subset=None,
):  # fmt: skip
    """The head of a request, with what the proxy says beside it."""
    pseudo = {":method": method, ":path": path, ":scheme": "http", ":authority": "x"}
    own = headers.items() if isinstance(headers, dict) else headers
    message = ProcessingRequest(
        request_headers={"headers": pairs_of([*pseudo.items(), *own]), "end_of_stream": ends},
        protocol_config={"request_body_mode": mode, "response_body_mode": answer_mode},
    )
    if subset is not None:
        hint = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        hint.value.update({f"{DESTINATION}-subset": subset})
    return message


def a_piece(body, ends=True, kind="request_body"):
    return ProcessingRequest(**{kind: {"body": body, "end_of_stream": ends}})


def trailers(kind="request_trailers"):
    return ProcessingRequest(**{kind: {}})


def an_answer(status=200, headers=JSON, pieces=(WHOLE,), served=None, by="attribute", ends=True):
    """The messages by which a proxy shows an answer."""
    head = {"headers": pairs_of({":status": str(status)} | headers), "end_of_stream": not pieces}
    first = ProcessingRequest(response_headers=head)
    if served is not None and by == "attribute":
        entry = first.attributes.add(key="envoy.filters.http.ext_proc")
        entry.value.update({"upstream.address": served})
    elif served is not None:
        entry = first.metadata_context.filter_metadata.add(key="envoy.lb")
        entry.value.update({f"{DESTINATION}-served": served})
    last = len(pieces) - 1
    bodies = [
        a_piece(piece, ends and number == last, "response_body")
        for number, piece in enumerate(pieces)
    ]
    return [first, *bodies]


class ProxyStream:
    """One stream of a proxy's filter, which ends as `serve_app.ext_proc.http2.Stream` does."""

    peer = "10.0.0.9"

    def __init__(self, site):
        self.sent = []
        self.status = None
        self.is_half_closed = False
        self.call = Exchange(site, self)

    def send(self, *messages):
        if self.status is None:
            self.sent += [ProcessingResponse.FromString(message) for message in messages]

    def end(self, status=0):
        if self.status is None:
            self.status = status
            if self.is_half_closed:
                self.call.close()

    def say(self, *messages):
        """Send messages as the proxy."""
        for message in messages:
            if self.status is None:
                is_raw = isinstance(message, bytes)
                self.call.take(message if is_raw else message.SerializeToString())

    def close(self):
        """End the stream as the proxy."""
        self.is_half_closed = True
        self.call.close()

    @property
    def is_open(self):
        return self.status is None

    @property
    def kinds(self):
        return [
            next(field.name for field, _ in message.ListFields() if field.name in ALL)
            for message in self.sent
        ]

    @property
    def placed(self):
        """Where the request goes; empty: it has not been said."""
        found = [m.dynamic_metadata["envoy.lb"][DESTINATION] for m in self.sent
                 if m.HasField("dynamic_metadata")]  # fmt: skip
        [value] = found or [""]
        if value:
            assert self.set_headers[DESTINATION] == value
        return value.split(",") if value else []

    @property
    def _common(self):
        parts = [getattr(m, kind) for m, kind in zip(self.sent, self.kinds, strict=True)]
        return [part.response for part in parts if hasattr(part, "response")]

    @property
    def set_headers(self):
        return {
            option.header.key.decode(): option.header.raw_value.decode("latin-1")
            for common in self._common
            for option in common.header_mutation.set_headers
        }

    @property
    def removed(self):
        return {name for common in self._common for name in common.header_mutation.remove_headers}

    @property
    def decision(self):
        return self.set_headers[DECISION]

    def handed_back(self, kind="request_body"):
        """The body in full duplex, which ends just once."""
        pieces = [
            m for m, each in zip(self.sent, self.kinds, strict=True) if each == kind
        ]  # fmt: skip
        mutations = [getattr(m, kind).response.body_mutation for m in pieces]
        ends = [mutation.streamed_response.end_of_stream for mutation in mutations]
        assert not any(ends[:-1])
        return b"".join(mutation.streamed_response.body for mutation in mutations)

    @property
    def refusal(self):
        """Status, error and headers of the answer that the proxy is to give."""
        immediate = self.sent[-1].immediate_response
        headers = {
            option.header.key.decode(): option.header.raw_value.decode()
            for option in immediate.headers.set_headers
        }
        return immediate.status.code, json.loads(immediate.body), headers


ALL = [field.name for field in ProcessingResponse.DESCRIPTOR.fields if field.number < 8]
assert {one.name for one in ProcessingRequest.DESCRIPTOR.oneofs} == {PART}


class ProxySite:
    """A gateway that picks, and what it has counted."""

    def __init__(self, gateway, site, folder):
        self.gateway, self.site, self._folder = gateway, site, folder

    def stream(self, *messages):
        stream = ProxyStream(self.site)
        stream.say(*messages)
        return stream

    async def ask(self, *bodies, **head):
        """A stream whose request has been placed or refused."""
        bodies = bodies or (BODY,)
        ends = [a_piece(body, number == len(bodies) - 1) for number, body in enumerate(bodies)]
        stream = self.stream(a_head(**head), *ends)
        await self.until(lambda: (stream.sent and stream.kinds[-1:] != ["request_headers"])
                         or stream.placed)  # fmt: skip
        return stream

    async def observe(self, stream, *messages):
        """Another stream, of a filter that observes, for the same request."""
        head = a_head({DECISION: stream.decision}, ends=True)
        head.observability_mode = True
        observer = self.stream(head, *messages)
        await turns()
        return observer

    async def until(self, is_so):
        for number in range(400):
            if is_so():
                return
            await asyncio.sleep(0.0 if number < 200 else 0.01)
        raise AssertionError("it did not become so in time")

    @property
    def outcomes(self):
        """Numbers of attempts, by their outcome."""
        found = {}
        for metric in self.gateway.metrics.registry.collect():
            for sample in metric.samples:
                if sample.name == "tokenyard_requests_total":
                    outcome = sample.labels["outcome"]
                    found[outcome] = found.get(outcome, 0) + int(sample.value)
        return found

    def value(self, name, **labels):
        return self.gateway.metrics.registry.get_sample_value(f"tokenyard_{name}", labels)

    @property
    def loads(self):
        """Requests in flight, by the place."""
        replicas = self.gateway.table.replicas.items()
        return {name.removeprefix("http://"): one.in_flight.count for name, one in replicas}

    @property
    def ejected(self):
        names = self.gateway.table.replicas
        ejected = [name for name in names if self.gateway.outliers.ejected_s(name)]
        return [name.removeprefix("http://") for name in ejected]

    async def is_quiet(self):
        """Nothing is in flight anywhere, and no task is left."""
        await self.until(lambda: not self.gateway.in_flight)
        await turns()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not self.site.deliveries
        assert not any(self.loads.values())
        assert self.value("requests_in_flight", pool="theirs") in (None, 0.0)

    def rows(self):
        """Rows of the decision log, oldest first."""
        self.gateway.log.close()
        files = self._folder.glob("*.parquet")
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        return sorted(rows, key=lambda row: row["time_s"])


async def turns(number=10):
    """Let everything that is ready run."""
    for _ in range(number):
        await asyncio.sleep(0.0)


@asynccontextmanager
async def a_proxy_site(
    folder=None, places=PLACES, pool=None, access=None, policy="sed", more_pools=(), **fields
):  # fmt: skip
    """Yield a gateway that picks among endpoints which nobody asks anything."""
    pool = {
        "name": "theirs", "kind": "external", "model": "m", "profile": PROFILE,
        "endpoints": [{"url": f"http://{place}"} for place in places],
    } | (pool or {})  # fmt: skip
    known = {"name": "t", "description": "t", "served_model": "m", "explore_fraction": 0.0}
    more_pools = [pool | more for more in more_pools]
    cluster = Cluster.model_validate(known | {"pools": [pool, *more_pools]} | fields)
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch(policy)
    metrics = Metrics()
    backends = {each.name: ExternalBackend(each, "m", metrics) for each in cluster.external_pools}
    access = access or Access(None)
    gateway = Gateway(
        cluster, manager, backends, metrics,
        log=None if folder is None else DecisionLog(folder), limits=RateLimits(access.limits_of),
    )  # fmt: skip
    gateway.refresh()
    intake = Intake(access, PendingBodies.of(cluster), errors.refuse)
    app = DataPath(gateway, EstimatingTokenizer(), intake, errors.refuse)
    addresses = Addresses(gateway.table.replicas.keys())
    max_bytes = cluster.limits.max_body_bytes
    site = Site(app, addresses, max_bytes, access.has_keys)
    try:
        yield ProxySite(gateway, site, folder)
    finally:
        manager.stop()
        for backend in backends.values():
            await backend.stop()


def check(test, *args, **options):
    """Run a coroutine that gets a site, at which nothing may be left afterwards."""

    async def inside():
        async with a_proxy_site(*args, **options) as site:
            await test(site)
            await site.is_quiet()

    asyncio.run(inside())
