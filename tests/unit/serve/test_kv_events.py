"""A gateway before endpoints that publish what they have cached, with their model's tokenizer."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from unit.serve.test_serve_external import PROFILE
from unit.stub_endpoint import stubs
from unit.tiny_tokenizer import save_tiny_tokenizer

from serve_app.cluster import Cluster
from serve_app.engines.kv_events import KvEventPublisher
from serve_app.engines.tokenizer import load_tokenizer
from serve_app.gateway.backends import load_tokenizers, make_backends
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.generation_reader import tokens_of
from serve_app.policy.manager import PolicyManager

BLOCK_TOKENS = 4
LIMIT_S = 60.0
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What do you have of this?"}]}
TEXT = {"model": "m", "prompt": "What do you have of this?"}


def a_cluster(endpoints, publishers, tokenizer, **fields):
    pools = [
        {"name": f"p{number}", "kind": "external", "model": "m", "profile": PROFILE,
         "endpoints": [endpoint.url], "prefix_block_tokens": BLOCK_TOKENS,
         "kv_events": {**publisher.addresses, "tokenizer": tokenizer}, **fields}
        for number, (endpoint, publisher) in enumerate(zip(endpoints, publishers, strict=True))
    ]  # fmt: skip
    return Cluster.model_validate(
        {"name": "c", "description": "c", "served_model": "m", "explore_fraction": 0.0,
         "pools": pools}
    )  # fmt: skip


@asynccontextmanager
async def a_gateway(tokenizer, number=2, **fields):
    """Yield a client, the gateway, and its endpoints with what publishes for each."""
    async with stubs(number) as endpoints:
        publishers = [KvEventPublisher("127.0.0.1") for _ in endpoints]
        cluster = a_cluster(endpoints, publishers, tokenizer, **fields)
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
        )
        manager.switch("vllm_cache_aware")
        metrics = Metrics()
        backends = make_backends(cluster, {}, metrics)
        tokenizers = load_tokenizers(cluster, backends)
        gateway = Gateway(cluster, manager, backends, metrics)
        api = create_gateway_api(gateway, tokenizers, Access(None, local_admin=True))
        transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            gateway.refresh()
            try:
                yield client, gateway, endpoints, publishers
            finally:
                manager.stop()
                for backend in backends.values():
                    await backend.stop()
                for publisher in publishers:
                    publisher.stop()


async def until(is_so):
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await asyncio.sleep(0.01)


def tell_all(publisher, ids):
    """Publish that all whole blocks of some tokens are stored."""
    size, starts = BLOCK_TOKENS, range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    publisher.publish(
        [
            ("BlockStored", [at], at - size if at else None, ids[at : at + size], size, None)
            for at in starts
        ]
    )
    return len(starts)


def index_of(gateway):
    return gateway.table._prefixes[BLOCK_TOKENS]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_goes_where_events_say_that_its_prompt_is(tmp_path, path):
    folder = save_tiny_tokenizer(tmp_path)
    tokenizer, body = load_tokenizer(folder), CHAT if "chat" in path else TEXT
    ids = (
        tokenizer.encode_chat(CHAT["messages"])
        if "chat" in path
        else tokenizer.encode(TEXT["prompt"])
    )

    async def run():
        async with a_gateway(folder) as (client, gateway, endpoints, publishers):
            for which in (1, 0):
                num_blocks = tell_all(publishers[which], ids)
                await until(lambda n=num_blocks: index_of(gateway).num_blocks == n)
                before = [one.num_asked for one in endpoints]
                for _ in range(3):
                    assert (await client.post(path, json=body)).status_code == 200
                after = [one.num_asked for one in endpoints]
                assert after[which] == before[which] + 3
                # What was sent counts no longer: the answers have ended.
                assert index_of(gateway).num_blocks == num_blocks
                publishers[which].publish(
                    [("AllBlocksCleared",) if which else ("BlockRemoved", [*range(0, len(ids), 4)])]
                )
                await until(lambda: index_of(gateway).num_blocks == 0)

    asyncio.run(run())


def test_a_pool_whose_tokenizer_is_not_there_believes_what_it_sends(tmp_path, caplog):
    async def run():
        with caplog.at_level(logging.WARNING):
            async with a_gateway(str(tmp_path / "nothing")) as (client, gateway, *_):
                assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
                assert index_of(gateway).num_blocks == len(TEXT["prompt"]) // 4 // BLOCK_TOKENS

    asyncio.run(run())
    assert len([one for one in caplog.messages if "does without block events" in one]) == 2


def test_an_endpoint_that_goes_is_forgotten_and_is_heard_again_when_it_comes_back(tmp_path):
    folder = save_tiny_tokenizer(tmp_path)

    async def run():
        async with a_gateway(folder, 1, allowed=["127.0.0.1"]) as (
            _,
            gateway,
            endpoints,
            publishers,
        ):
            backend = gateway.backends["p0"]
            backend.start()
            tell_all(publishers[0], [*range(40)])
            await until(lambda: index_of(gateway).num_blocks == 10)
            backend.change([endpoints[0].url], adds=False)
            gateway.refresh()
            assert index_of(gateway).num_blocks == 0
            assert not gateway.table.replicas
            backend.change([endpoints[0].url], adds=True)
            gateway.refresh()
            await until(lambda: index_of(gateway).num_blocks == 10)

    asyncio.run(run())


def test_replicas_that_end_never_silence_those_that_follow(tmp_path):
    """ZeroMQ's only thread waited for good where nobody took the events of a socket."""
    folder = save_tiny_tokenizer(tmp_path)

    async def run():
        for _ in range(40):
            async with a_gateway(folder, 1) as (_, gateway, _, publishers):
                gateway.backends["p0"].start()
                tell_all(publishers[0], [*range(40)])
                await until(lambda of=gateway: index_of(of).num_blocks == 10)

    asyncio.run(run())


def test_events_need_the_size_of_a_block():
    pool = {
        "name": "p",
        "kind": "external",
        "model": "m",
        "endpoints": ["http://h"],
        "kv_events": {},
    }
    with pytest.raises(ValueError, match="kv_events needs prefix_block_tokens"):
        Cluster.model_validate(
            {"name": "c", "description": "c", "served_model": "m", "pools": [pool]}
        )


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [{"role": "assistant", "content": None, "tool_calls": CALLS}],
    ],
)
def test_a_template_gets_messages_and_tools_as_vllm_hands_them_over(tmp_path, messages):
    folder = save_tiny_tokenizer(tmp_path)
    tokenizer = load_tokenizer(folder)
    tokenizer._tokenizer.chat_template = (
        "{{ tools | tojson }}{% for one in messages %}{{ one.content }}"
        "{% for call in one.tool_calls or [] %}{{ call.function.arguments.at + 1 }}{% endfor %}"
        "{% endfor %}"
    )
    fields = {"messages": messages, "tools": TOOLS}
    ids = asyncio.run(tokens_of("/v1/chat/completions", fields, "whole text", tokenizer))
    said = "2" if messages[0]["content"] is None else "Hi"
    assert tokenizer.decode(ids) == json.dumps(TOOLS, separators=(", ", ": ")) + said


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"messages": 3}, {"messages": [{"content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "a", "content": [{"text": "a"}, {"text": "b"}]}]},
        {"messages": [{"role": "a", "content": "b"}], "chat_template": "c"},
        {"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}]},
    ],
)  # fmt: skip
def test_a_prompt_that_nobody_can_be_sure_of_is_all_of_its_text(tmp_path, fields):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path))
    ids = asyncio.run(tokens_of("/v1/chat/completions", fields, "whole text", tokenizer))
    assert ids == tokenizer.encode("whole text")
