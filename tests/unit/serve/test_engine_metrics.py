"""What engines publish, under the names of each, and what stands in for what they do not."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest
from unit.serve.test_serve_external import BODY, a_gateway, run, text_of, until, waiting
from unit.serve.test_service_discovery import a_pool, a_site
from unit.stub_endpoint import stubs

from serve_app.cluster import EndpointProfile
from serve_app.endpoints import MetricNames
from serve_app.gateway import scraping
from serve_app.gateway.engine_metrics import (
    Reading,
    StuckMetrics,
    read_metrics,
    read_models,
    with_page,
)
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.replicas import EndpointInfo

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a } b"} 4.0
vllm:num_requests_waiting{engine="1",model_name="a } b"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 77.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500"} 1.0
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 4.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
"""
LLAMA = """\
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 5
llamacpp:requests_deferred 4
"""
TGI = "tgi_queue_size 4\ntgi_batch_current_size 5\ntgi_batch_current_size_other 77\n"
TRTLLM = """\
trtllm_num_requests_running{model_name="m"} 5.0
trtllm_num_requests_waiting{model_name="m"} 4.0
trtllm_kv_cache_utilization{model_name="m"} 0.5
trtllm_kv_cache_max_blocks 1000
trtllm_kv_cache_tokens_per_block 32
"""
TRITON = """\
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="t",version="1"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="t",version="1"} 6239
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="t",version="1"} 64
"""
USUAL = MetricNames()


@pytest.mark.parametrize(
    ("page", "engine", "kv_used", "kv_tokens"),
    [
        (VLLM, "vllm", 0.5, 24_000),
        (VLLM.replace("kv_cache_usage", "gpu_cache_usage"), "vllm", 0.5, 24_000),
        (VLLM.replace("\nvllm:", "\nray_vllm_"), "vllm", 0.5, 24_000),
        (VLLM.replace("\nvllm:", "\nray_vllm:"), "vllm", 0.5, 24_000),
        (VLLM.replace("\n", "\r\n"), "vllm", 0.5, 24_000),
        (VLLM.replace('num_gpu_blocks="1000"', 'kv_cache_size_tokens="9"'), "vllm", 0.5, 9),
        (SGLANG, "sglang", 0.5, None),
        (SGLANG + "sglang:max_total_num_tokens 4096\n", "sglang", 0.5, 4096),
        (SGLANG + "sglang:num_pages 64\nsglang:page_size 16\n", "sglang", 0.5, 1024),
        (
            SGLANG + 'sglang:cache_config_info{num_pages="64",page_size="1"} 1\n',
            "sglang", 0.5, 64,
        ),
        (SGLANG.replace("sglang:", "sglang_"), "sglang", 0.5, None),
        (LLAMA, "llama.cpp", None, None),
        (LLAMA + "llamacpp:kv_cache_usage_ratio 0.5\n", "llama.cpp", 0.5, None),
        (TGI, "tgi", None, None),
        (TRTLLM, "trtllm-serve", 0.5, 32_000),
        (TRITON, "triton", 0.5, 6239 * 64),
    ],
)  # fmt: skip
def test_each_engine_is_read_by_its_own_names_and_engines_behind_one_endpoint_are_added_up(
    page, engine, kv_used, kv_tokens
):
    assert read_metrics(page.encode(), USUAL) == Reading(engine, 4, 5, kv_used, kv_tokens)


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("vllm:num_requests_waiting NaN", "waiting"),
        ("vllm:num_requests_waiting +Inf", "waiting"),
        ("vllm:num_requests_running -1", "running"),
        ("vllm:kv_cache_usage_perc 37.5", "kv_used_fraction"),
    ],
)
def test_a_value_that_cannot_be_true_is_as_good_as_not_there_and_costs_no_other(line, missing):
    known = {"waiting": 4, "running": 5, "kv_used_fraction": 0.5}
    page = "vllm:num_requests_waiting 4\nvllm:num_requests_running 5\nvllm:kv_cache_usage_perc 0.5"
    page = "\n".join(one for one in page.split("\n") if one.split()[0] != line.split()[0])
    reading = read_metrics(f"{page}\n{line}".encode(), USUAL)
    assert reading == Reading("vllm", **{**known, missing: None})
    assert reading.missing == (missing,)
    assert read_metrics(b"", USUAL) == Reading()
    assert read_metrics(b"up 1\n", USUAL).missing == ("waiting", "running", "kv_used_fraction")


def test_a_pool_may_have_names_of_its_own():
    names = MetricNames(waiting="queue{kind=all}", running='mine:running{kind="x"}', kv_used="kv")
    page = b'queue{kind="some"} 9\nqueue{kind="all"} 2\nmine:running{kind="x"} 3\nkv 0.1\n'
    assert read_metrics(page, names) == Reading(None, 2, 3, 0.1)
    names = MetricNames(waiting="queue{kind=all}")
    assert read_metrics(page + VLLM.encode(), names) == Reading("vllm", 2, 5, 0.5, 24_000)


def test_models_lengths_and_sizes_are_read_where_engines_say_them():
    cards = [
        {"id": "m", "owned_by": "vllm", "max_model_len": 2048},
        {"id": "sql", "parent": "m", "max_model_len": None},
    ]
    vllm = EndpointInfo("vllm", frozenset(("m", "sql")), 2048)
    assert read_models({"object": "list", "data": cards}) == vllm
    for odd in (None, [], {"data": 3}, {"data": [3]}, {"data": [{"id": 4}]}):
        assert read_models(odd) == EndpointInfo()
    props = {"default_generation_settings": {"n_ctx": 1024}, "total_slots": 4}
    told = EndpointInfo(None, None, 1024, 4, 4096)
    assert with_page(EndpointInfo(), "llama.cpp", props) == told
    page = {"max_running_requests": None, "max_total_num_tokens": 9000, "context_length": 512}
    assert with_page(vllm, "sglang", page) == EndpointInfo("vllm", vllm.models, 2048, None, 9000)
    page = {"max_total_tokens": 2048, "max_batch_size": True, "max_batch_total_tokens": 1e9}
    assert with_page(EndpointInfo(), "tgi", page) == EndpointInfo(None, None, 2048)
    assert with_page(EndpointInfo(), "tgi", ["odd"]) == EndpointInfo()


def test_the_file_wins_over_the_endpoint_and_the_endpoint_over_what_is_assumed():
    speed = {"iteration_s": 0.01, "prefill_token_s": 1e-5, "sequence_s": 5e-4}
    assumed = EndpointProfile(**speed).completed(None, None)
    assert (assumed.max_batch, assumed.token_budget, assumed.kv_capacity_tokens) == (
        256, 2048, 131_072,
    )  # fmt: skip
    assert EndpointProfile(**speed).completed(4, 4096.0).kv_capacity_tokens == 4096
    declared = EndpointProfile(**speed, max_batch=8, kv_capacity_tokens=1.0).completed(4, 4096.0)
    assert (declared.max_batch, declared.kv_capacity_tokens) == (8, 1.0)


def test_what_never_changes_is_left_out_until_it_does_and_costs_no_other():
    stuck, odd = StuckMetrics(), Reading("vllm", 41, 3, 0.9)
    assert stuck.left_out(odd, 100.0, 0, 0) == odd
    assert stuck.left_out(odd, 109.0, 0, 3) == odd
    assert stuck.left_out(odd, 111.0, 0, 3) == Reading("vllm")
    # One that moves counts again, the others do not.
    moved = Reading("vllm", 41, 4, 0.9)
    assert stuck.left_out(moved, 111.5, 1, 5) == Reading("vllm", None, 4, None)
    # With requests that came and went meanwhile it is seen sooner.
    assert stuck.left_out(moved, 114.0, 1, 9) == Reading("vllm")
    for steady in (Reading("vllm", 0, 0, 0.0), Reading("vllm", 0, 8, 0.1)):
        # An idle one, and one that has what it was sent.
        assert stuck.left_out(steady, 115.0, 8, 9) == steady
        assert stuck.left_out(steady, 999.0, 8, 99) == steady


def kinds_of(endpoints):
    """Make the endpoints a vLLM, an SGLang, a llama.cpp and one that publishes nothing."""
    vllm, sglang, llama, _ = endpoints

    def page(running, waiting, endpoint, more=""):
        return lambda: f"{running} {endpoint.num_open}\n{waiting} 0\n{more}"

    vllm.pages = {
        "/metrics": page(
            "vllm:num_requests_running", "vllm:num_requests_waiting", vllm,
            "vllm:kv_cache_usage_perc 0.0\n",
        )
    }  # fmt: skip
    sglang.pages = {"/metrics": page("sglang:num_running_reqs", "sglang:num_queue_reqs", sglang)}
    llama.pages = {
        "/metrics": page("llamacpp:requests_processing", "llamacpp:requests_deferred", llama)
    }
    endpoints[3].pages = {}


async def ask_many(client, number, at_once):
    left = iter(range(number))

    async def ask():
        for _ in left:
            text_of(await client.post("/v1/completions", json=BODY))

    await asyncio.gather(*(ask() for _ in range(at_once)))


def test_endpoints_of_any_engine_and_of_none_get_equal_shares():
    async def test(client, gateway, endpoints):
        kinds_of(endpoints)
        for one in endpoints:
            one.delay_s = 0.1
        await until(lambda: heard(gateway) == 4)
        await ask_many(client, 400, 16)
        shares = [one.num_asked for one in endpoints]
        assert all(abs(one - 100) <= 20 for one in shares), shares
        assert "stale" not in gateway.manager.picker.counts.fallbacks
        told = [one.info for one in gateway.table.replicas.values()]
        assert [one.engine for one in told] == ["vllm", "sglang", "llama.cpp", None]
        assert [one.missing for one in told] == [
            (), ("kv_used_fraction",), ("kv_used_fraction",),
            ("waiting", "running", "kv_used_fraction"),
        ]  # fmt: skip

    run(test, 4, scrapes=True, circuit_breaker={"budget_s": 1.0})


def heard(gateway):
    gateway.refresh()
    return sum(one.status.observed_at_s > 0 for one in gateway.table.replicas.values())


@pytest.mark.parametrize("page", [None, "sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\n"])
def test_a_pool_without_vllm_is_decided_by_the_policy(page):
    async def test(client, gateway, endpoints):
        for one in endpoints:
            one.pages = {} if page is None else {"/metrics": page}
        await until(lambda: all(one.num_scraped > 3 for one in endpoints))
        await asyncio.sleep(0.4)  # Longer than what is heard counts as current.
        await ask_many(client, 12, 2)
        assert not gateway.manager.picker.counts.fallbacks
        assert min(one.num_asked for one in endpoints) > 0

    settings = {"budget_s": 1.0, "stale_after_s": 0.35}
    with pytest.MonkeyPatch.context() as short:
        short.setattr(scraping, "EVERY_S", 0.05)
        run(test, 2, scrapes=True, circuit_breaker=settings)


@pytest.mark.parametrize("metric", ["waiting", "running"])
def test_an_endpoint_whose_metrics_are_stuck_gets_its_share_again(metric, monkeypatch):
    monkeypatch.setattr("serve_app.gateway.engine_metrics._STUCK_S", 0.5)

    async def test(client, gateway, endpoints):
        odd, well = endpoints

        def page():
            waiting, running = (41, odd.num_open) if metric == "waiting" else (0, 41)
            return (
                f"vllm:num_requests_waiting {waiting}\nvllm:num_requests_running {running}\n"
                "vllm:kv_cache_usage_perc 0.9\n"
            )

        odd.pages = {"/metrics": page}
        well.pages = {}
        for one in endpoints:
            one.delay_s = 0.02
        await until(lambda: not info_of(gateway, odd).missing)
        await until(lambda: metric in info_of(gateway, odd).missing)
        await ask_many(client, 100, 8)
        assert metric in info_of(gateway, odd).missing
        assert abs(odd.num_asked - 50) <= 10, odd.num_asked

    run(test, 2, scrapes=True, circuit_breaker={"budget_s": 1.0})


def info_of(gateway, endpoint):
    gateway.refresh()
    return gateway.table.replicas[endpoint.url].info


def test_an_endpoint_whose_metrics_hang_is_heard_of_all_the_same(monkeypatch):
    monkeypatch.setattr(scraping, "TIMEOUT_S", 0.1)

    async def test(client, gateway, endpoints):
        (odd,) = endpoints

        async def get(writer, path):
            if path.startswith("/v1"):
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

        odd._get = get
        await until(lambda: heard(gateway) == 1 and len(info_of(gateway, odd).missing) == 3)

    run(test, scrapes=True)


def test_metrics_may_be_at_another_port_and_path():
    async def test():
        async with stubs(2) as (one, metrics):
            one.pages, metrics.pages = {}, {"/mine": "queue 3\n", "/v1/models": "{}"}
            port = urlsplit(metrics.url).port
            names = {"port": port, "path": "/mine", "waiting": "queue"}
            pool = a_pool(endpoints=[one.url], metrics=names)
            async with a_site(pool) as (_, gateway, _):
                await until(lambda: gateway.refresh() and waiting(gateway, one) == 3)
                assert info_of(gateway, one).missing == ("running", "kv_used_fraction")
                # Where nobody answers there, the endpoint is heard of as long as it answers.
                metrics.drips = True
                await until(lambda: waiting(gateway, one) == 0)

    with pytest.MonkeyPatch.context() as short:
        short.setattr(scraping, "TIMEOUT_S", 0.1)
        asyncio.run(test())


def test_the_second_path_is_asked_where_the_first_has_no_metrics():
    async def test(client, gateway, endpoints):
        (one,) = endpoints
        one.pages = {"/metrics": "[]", "/prometheus/metrics": TRTLLM}
        await until(lambda: info_of(gateway, one).engine == "trtllm-serve")
        assert waiting(gateway, one) == 4
        assert info_of(gateway, one).kv_capacity_tokens == 32_000

    run(test, scrapes=True)


def test_what_an_endpoint_says_of_itself_is_shown_and_used(monkeypatch):
    monkeypatch.setattr(scraping, "INFO_EVERY_S", 0.05)

    async def test(client, gateway, endpoints):
        (one,) = endpoints
        card = {"id": "m", "owned_by": "llamacpp"}
        props = {"default_generation_settings": {"n_ctx": 512}, "total_slots": 3}
        one.pages = {"/v1/models": json.dumps({"data": [card]}), "/props": json.dumps(props)}
        await until(lambda: info_of(gateway, one).max_model_len == 512)
        shown = (await client.get("/v1/pools")).json()["replicas"][0]
        assert (shown["engine"], shown["models"]) == ("llama.cpp", ["m"])
        assert shown["profile"]["max_batch"] == 8  # The file's.
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == 512
        # What is longer is the endpoint's to refuse, as where the file says how long it may be.
        answer = await client.post("/v1/completions", json={**BODY, "max_tokens": 9999})
        assert answer.status_code == 200
        one.pages = {"/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 128}]})}
        await until(lambda: info_of(gateway, one).max_model_len == 128)

    run(test, scrapes=True)


def test_a_length_that_nobody_says_is_left_out_and_the_files_wins():
    async def unknown():
        async with a_gateway(1) as (client, gateway, _):
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert "max_model_len" not in model
            (pool,) = gateway.backends.values()
            known = pool.settings.model_copy(update={"max_model_tokens": 64})
            gateway.backends["theirs"] = other = ExternalBackend(known, "m", gateway.metrics)
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert model["max_model_len"] == 64
            await other.stop()

    asyncio.run(unknown())
