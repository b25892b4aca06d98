"""How often a request is sent: what endpoints saw is what counters, log and spans say."""

import asyncio
import collections
import random

import pyarrow.parquet as pq
import pytest
from sizes import scaled
from unit.raw_endpoint import read_body, read_head
from unit.serve.test_serve_external import BODY, a_cluster, gateway_before, pools_metric
from unit.stub_endpoint import DONE, an_event, served

from serve_app.gateway import upstream
from serve_app.gateway.decision_log import DecisionLog

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [an_event("a"), an_event("b"), an_event("", "stop"), DONE]
ANSWER = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in EVENTS) + b"0\r\n\r\n"
REFUSAL = b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n{}"


class ClosingEndpoint:
    """Closes each connection at a point of the exchange that `draw` names, or later."""

    def __init__(self, draw):
        self.draw = draw
        self.num_seen = 0
        """Requests of which a byte came."""
        self.url = ""

    async def serve(self, reader, writer):
        try:
            while True:
                await reader.readexactly(1)
                self.num_seen += 1
                point = self.draw()
                if point == "in the head":
                    return
                _, headers = await read_head(reader)
                await read_body(reader, headers)
                if point == "without a word":
                    return
                if point == "after a while":
                    await asyncio.sleep(2 * upstream._STALE_S)
                    return
                if isinstance(point, int):
                    writer.write(ANSWER[:point])
                    await writer.drain()
                    return
                writer.write(REFUSAL if point == "failure" else ANSWER)
                await writer.drain()
                if point == "once it is idle":
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # The gateway has closed it.
        finally:
            writer.close()


async def ask(client):
    """How one request ended: a status, or whether its stream was complete."""
    answer = await client.post("/v1/completions", json=BODY)
    if answer.status_code != 200:
        return answer.status_code
    return "complete" if answer.text.endswith("data: [DONE]\n\n") else "cut"


def test_what_endpoints_saw_is_what_counters_and_log_say(tmp_path):
    rng = random.Random(7)

    def draw():
        points = ["in the head", "without a word", "once it is idle", "failure"]
        return rng.choice([*points, *[None] * 6, rng.randrange(1, len(ANSWER))])

    async def test():
        log = DecisionLog(tmp_path)
        endpoints = [ClosingEndpoint(draw) for _ in range(4)]
        async with served(endpoints):
            cluster = a_cluster(endpoints, {}, outlier_ejection={"base_s": 1e-3, "max_s": 1e-3})
            async with gateway_before(cluster, log=log) as (client, gateway):
                ends = collections.Counter()
                for _ in range(scaled(6_400) // 8):
                    asks = (ask(client) for _ in range(8))
                    ends.update(await asyncio.gather(*asks))
                counted = pools_metric(gateway, "sends_total")
        log.close()
        rows = [
            row for file in tmp_path.glob("*.parquet") for row in pq.read_table(file).to_pylist()
        ]
        assert set(ends) == {"complete", "cut", 503}
        assert counted == sum(one.num_seen for one in endpoints)
        assert counted == sum(row["num_sends"] for row in rows)
        assert {row["num_sends"] for row in rows} <= {0, 1, 2}
        attempts = collections.Counter(row["request_id"] for row in rows)
        assert max(attempts.values()) == cluster.limits.max_retries + 1

    asyncio.run(test())


@pytest.mark.parametrize(
    ("point", "most"), [("without a word", 2), ("after a while", 1), ("in the head", 2)]
)
def test_one_request_is_sent_once_an_attempt_and_once_more_over_a_connection_that_was_idle(
    point, most
):
    """A pool of kept connections is not tried one after another, nor those of the scraper."""
    points = []

    async def test():
        endpoints = [ClosingEndpoint(lambda: points[-1] if points else None) for _ in range(3)]
        async with served(endpoints):
            cluster = a_cluster(endpoints, {})
            async with gateway_before(cluster) as (client, gateway):
                await asyncio.gather(*(ask(client) for _ in range(24)))
                pools = gateway.backends["theirs"]._endpoints.values()
                assert min(len(one.origin.idle) for one in pools) > 2
                points.append(point)
                before = [one.num_seen for one in endpoints]
                assert await ask(client) == 503
                sent = [one.num_seen - seen for one, seen in zip(endpoints, before, strict=True)]
                assert sent == [most] * 3

    asyncio.run(test())
