"""A gateway before engines of others, asked by OpenAI's client: `make test-engines`."""

import json
import signal
import time

import httpx
import openai
import pytest
from engines.real_engines import (
    KINDS,
    MAX_MODEL_LEN,
    NUM_CLIENTS,
    Load,
    a_site,
    status_of,
    wait_until,
)

pytestmark = pytest.mark.engines

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
LONG = [{"role": "user", "content": "word " * 3000}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module", params=KINDS)
def a_whole_site(request, tmp_path_factory):
    with a_site(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture
def site(a_whole_site):
    """All engines are up, and asked."""
    a_whole_site.heal()
    return a_whole_site


def weather_of(city, number):
    """One round of a conversation with a tool."""
    arguments = json.dumps({"city": city})
    call = {"name": "get_weather", "arguments": arguments}
    return [
        {"role": "user", "content": f"Weather in {city}?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": f"call{number}", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": f"call{number}", "content": "20 degrees"},
        {"role": "assistant", "content": "20 degrees."},
    ]


def test_the_gateway_knows_what_each_engine_is(site):
    for engine in site.engines:
        wait_until(lambda engine=engine: site.replica(engine)["missing"] == site.kind.missing)
        known = site.replica(engine)
        assert known["engine"] == site.kind.engine
        assert known["models"] == ["smollm2"]
        assert known["max_model_len"] == MAX_MODEL_LEN
        assert known["age_s"] < 60
    cards = {one.id: one.max_model_len for one in site.client.models.list().data}
    assert cards == {"my-model": MAX_MODEL_LEN, "half": MAX_MODEL_LEN}


def test_usage_of_answers_is_what_the_engines_count(site):
    before = sum(one.tokens for one in site.engines)
    whole = site.chat()
    assert whole.choices[0].message.content
    *chunks, last = site.chat(stream=True, stream_options={"include_usage": True})
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text
    assert (last.choices, last.usage.prompt_tokens) == ([], whole.usage.prompt_tokens)
    told = whole.usage.completion_tokens + last.usage.completion_tokens
    assert told == 2 * 16
    wait_until(lambda: sum(one.tokens for one in site.engines) - before == told)


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "whole"])
def test_a_tool_is_called(site, streams):
    messages = [*weather_of("Rome", 1), *weather_of("Berlin", 2)]
    messages.append({"role": "user", "content": "Weather in Paris?"})
    asked = {"messages": messages, "tools": TOOLS, "max_tokens": 60}
    if streams:
        deltas = [one.choices[0].delta for one in site.chat(stream=True, **asked)]
        calls = [one.function for delta in deltas for one in delta.tool_calls or []]
        name = "".join(one.name or "" for one in calls)
        arguments = "".join(one.arguments or "" for one in calls)
    else:
        (choice,) = site.chat(**asked).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Paris"})


def test_an_answer_keeps_to_a_schema(site):
    schema = {**CITY, "properties": {"city": {"enum": ["Paris", "Rome"]}}}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    answer = site.chat("Name a city as JSON.", response_format=form, max_tokens=100)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_responses_are_answered(site):
    asked = {"model": "my-model", "input": "Hi", "max_output_tokens": 16}
    assert site.client.responses.create(**asked).output_text
    *_, last = site.client.responses.create(**asked, stream=True)
    assert last.response.output_text


def test_anthropics_messages_are_answered(site):
    body = {"model": "my-model", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    whole = httpx.post(f"{site.url}/v1/messages", json=body, timeout=300).json()
    assert whole["content"][0]["text"]
    assert whole["usage"]["output_tokens"]
    stream = httpx.post(f"{site.url}/v1/messages", json=body | {"stream": True}, timeout=300).text
    assert stream.count("event: content_block_delta") > 1
    assert stream.rstrip().splitlines()[-2] == "event: message_stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": LONG},
        {"messages": LONG, "stream": True},
        {"messages": "none"},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
    ],
    ids=["too long", "too long a stream", "no messages", "an image"],
)
def test_a_refusal_of_an_engine_is_the_callers_and_ejects_nobody(site, fields):
    for _ in range(4):
        answer, theirs = site.post("/v1/chat/completions", {"model": "my-model", **fields})
        assert answer.status_code == 400
        assert answer.json() == theirs.json()
    assert site.is_ready()
    assert site.counter("ejections_total") == 0
    assert site.chat().choices[0].message.content


def test_an_unknown_model_is_refused(site):
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        site.chat(model="no-such-model")


def test_a_route_that_the_engines_lack_is_refused_and_ejects_nobody(site):
    with pytest.raises(openai.APIStatusError) as raised:
        site.client.embeddings.create(model="my-model", input="Hi")
    (theirs,) = site.post("/v1/embeddings", {"model": "my-model", "input": "Hi"})[1:]
    assert raised.value.status_code == theirs.status_code
    assert site.counter("ejections_total") == 0
    assert site.chat().choices[0].message.content


def test_connections_that_engines_close_cost_no_answer(site):
    retries, ejections = site.counter("retries_total"), site.counter("ejections_total")
    for _ in range(3):
        with Load(site.stream, max_tokens=2) as load:
            load.wait_for(2 * NUM_CLIENTS)
        assert not load.failed
        time.sleep(6.0)  # llama.cpp keeps idle connections for 5 s.
    assert site.counter("retries_total") == retries
    assert site.counter("ejections_total") == ejections


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "whole"])
def test_a_caller_who_leaves_stops_the_engine(site, streams):
    if not streams and not site.kind.stops:
        pytest.skip(f"{site.kind.engine} goes on with a whole answer, also without a gateway")
    before = sum(one.tokens for one in site.engines)
    fields = {"max_tokens": 800, "extra_body": {"ignore_eos": True}}
    if streams:
        _, stream = site.begin_stream(**fields)
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            site.chat(**fields, timeout=1.0)
    wait_until(lambda: not any(one.metric(site.kind.running) for one in site.engines))
    assert sum(one.tokens for one in site.engines) - before < 800


def test_callers_beyond_what_engines_take_at_once_wait_there(site):
    with Load(site.stream, num_clients=24) as load:
        wait_until(lambda: any(one["published"]["num_waiting"] for one in site.replicas().values()))
        load.wait_for(2 * 24)
    assert not load.failed


def test_an_endpoint_that_does_not_have_its_model_costs_no_answer(site):
    with Load(site.stream, model="half") as load:
        load.wait_for(3 * NUM_CLIENTS)
    assert not load.failed
    assert site.counter("ejections_total") == 0


def test_an_engine_is_taken_out_and_brought_back_under_load(site):
    gone = site.engines[0]
    with Load(site.stream) as load:
        load.wait_for(NUM_CLIENTS)
        site.change("DELETE", gone)
        wait_until(lambda: gone.url not in site.replicas())
        before = gone.tokens
        load.wait_for(2 * NUM_CLIENTS)
        assert gone.tokens == before
        site.change("POST", gone)
        wait_until(lambda: gone.tokens > before)
    assert not load.failed


def test_engines_that_are_alike_get_alike_shares(site):
    before = [one.tokens for one in site.engines]
    with Load(site.stream, extra_body={"ignore_eos": True}) as load:
        load.wait_for(10 * NUM_CLIENTS)
    assert not load.failed
    shares = [one.tokens - least for one, least in zip(site.engines, before, strict=True)]
    assert min(shares) / sum(shares) > 0.3, shares


def test_an_engine_that_stands_still_for_five_seconds_costs_no_answer(site):
    stopped = site.engines[0]
    with Load(site.stream) as load:
        load.wait_for(NUM_CLIENTS)
        stopped.signal(signal.SIGSTOP)
        since_s = time.monotonic()
        try:
            time.sleep(5.0)
            # The other engine goes on.
            wait_until(lambda: any(one.asked_s > since_s for one in load.answers))
        finally:
            stopped.signal(signal.SIGCONT)
        load.wait_for(3 * NUM_CLIENTS)
    assert not load.failed


def test_the_death_of_an_engine_costs_what_it_had_begun_and_its_return_is_noticed(site):
    killed = site.engines[0]
    long = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    begun = [site.begin_stream(**long) for _ in range(NUM_CLIENTS)]
    at_killed = site.replica(killed)["in_flight"]
    assert 0 < at_killed < NUM_CLIENTS
    with Load(site.stream) as load, Load(site.whole) as at_once:
        for one in (load, at_once):
            one.wait_for(NUM_CLIENTS)
        killed.kill()
        for one in (load, at_once):
            one.wait_for(3 * NUM_CLIENTS)
        wait_until(lambda: site.replica(killed)["state"] != "ready")
    assert not at_once.failed
    cut = [one for one in load.answers if one.error]
    assert len(cut) <= NUM_CLIENTS
    ended = [site.read(*one) for one in begun]
    failed = [one for one in ended if one.error]
    assert len(failed) == at_killed
    assert {one.finish_reason for one in ended if not one.error} == {"length"}
    for one in (*failed, *cut):
        assert one.num_chunks
        assert "closed its connection, after" in one.error.message
    with Load(site.stream) as load:
        load.wait_for(2 * NUM_CLIENTS)
        killed.start()
        killed.wait_until_up()
        wait_until(lambda: killed.tokens > 0)
    assert not load.failed


def test_a_gateway_whose_engines_are_all_down_says_so_until_one_is_back(site):
    for one in site.engines:
        one.kill()
    wait_until(lambda: status_of(f"{site.url}/health") == 503)
    with pytest.raises(openai.InternalServerError) as raised:
        site.chat()
    assert raised.value.status_code == 503
    site.engines[0].start()
    wait_until(lambda: status_of(f"{site.url}/health") == 200)
    assert site.chat().choices[0].message.content
