"""The load generator: what it sends, when, and what it reads of an answer."""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import yaml
from scripts import call, load_script, refusal

from serve_app import load_generator
from serve_app.http.free_port import free_port
from serve_app.load_generator import (
    Client,
    EventReader,
    LoadConfig,
    ServerError,
    make_asks,
    make_rows,
    read_stretches,
    replay,
    summarise,
)
from tokenyard.routing.scenario import load_scenario
from tokenyard.workload.trace import Trace


def read_requests(config):
    return read_stretches(config, 1)[0]


def event(**fields):
    return f"data: {json.dumps(fields)}"


def test_the_first_text_is_the_first_token_and_the_last_event_ends_the_answer():
    reader = EventReader()
    lines = [
        ": ping", event(choices=[]), event(choices=[{"text": ""}]), "",
        event(choices=[{"text": "a"}], error=None), event(usage={"a": 1}),
    ]  # fmt: skip
    for now_s, line in enumerate(lines):
        reader.read(line, float(now_s))
    assert (reader.first_s, reader.usage, reader.done) == (4.0, {"a": 1}, False)
    reader.read("data: [DONE]", 9.0)
    assert (reader.first_s, reader.done) == (4.0, True)


def test_events_need_no_space_and_an_answer_without_text_has_its_first_token_at_its_end():
    reader = EventReader()
    reader.read('data:{"choices": [{"text": ""}]}', 1.0)
    reader.read("data:[DONE]", 2.0)
    assert (reader.first_s, reader.done) == (2.0, True)


@pytest.mark.parametrize("error", [{"message": "replica died"}, "replica died"])
def test_an_answer_that_the_server_breaks_off_says_why(error):
    with pytest.raises(ServerError, match="replica died"):
        EventReader().read(event(error=error), 0.0)
    with pytest.raises(ValueError, match="an event is 5"):
        EventReader().read("data: 5", 0.0)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"{i},{1000 + i},{50 + i}" for i in range(20)]
    path.write_text("\n".join(["arrival_s,context_tokens,generated_tokens", *rows]))
    return str(path)


def test_a_trace_is_read_from_its_first_request_on_and_faster_where_that_is_asked_for(trace):
    sent = read_requests(LoadConfig(trace=trace, first=4, rate_scale=2.0, duration_s=3.0))
    assert sent.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert sent.context_tokens[0] == 1004


def test_stretches_follow_each_other_without_a_request_twice(trace):
    one, two = read_stretches(LoadConfig(trace=trace, first=4, duration_s=3.0), 2)
    assert one.context_tokens.tolist() == [1004, 1005, 1006]
    assert two.context_tokens.tolist() == [1007, 1008, 1009]
    assert two.arrival_s.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="no request arrives within 3 s after 15 s"):
        read_stretches(LoadConfig(trace=trace, first=4, rate_scale=1.2, duration_s=3.0), 7)


def test_generated_traffic_has_the_rate_and_the_arrivals_of_its_scenario():
    config = LoadConfig(scenario="azure_code_slo", rate=10.0, duration_s=200.0)
    sent = read_requests(config)
    assert sent.num_requests == pytest.approx(2000, abs=4 * np.sqrt(2000))
    gaps_s = np.diff(sent.arrival_s)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.15), "Poisson arrivals"
    assert read_requests(config).arrival_s.tolist() == sent.arrival_s.tolist()
    bursts_s = np.diff(read_requests(replace(config, scenario="azure_code_mixed_gpus")).arrival_s)
    assert bursts_s.std() / bursts_s.mean() > 1.3


def test_a_file_that_is_not_there_and_a_time_without_requests_are_refused():
    with pytest.raises(ValueError, match=r"trace gone\.csv is not there"):
        read_requests(LoadConfig(trace="gone.csv"))
    with pytest.raises(ValueError, match="no request arrives within 1 s"):
        read_requests(LoadConfig(rate=1e-6, duration_s=1.0))


@pytest.mark.parametrize("name", ["rate", "rate_scale", "length_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_rates_and_lengths_that_mean_nothing_are_refused(trace, name, value):
    for of in (trace, None):
        with pytest.raises(ValueError, match=f"{name} {value:g} must be positive and finite"):
            read_requests(LoadConfig(trace=of, **{name: value}))


def test_prompts_have_the_wanted_lengths_and_fit_the_model(trace):
    requests = read_requests(LoadConfig(trace=trace))
    asks = make_asks(LoadConfig(length_scale=0.1), requests, 0.5, longest=4096)
    assert [len(one.words) for one in asks[:2]] == [50, 50]
    assert asks[0].max_tokens == 5
    short = make_asks(LoadConfig(), requests, 1.0, longest=200)
    assert all(len(one.words) + one.max_tokens < 200 for one in short)


def test_equal_prefix_blocks_become_equal_words():
    lengths = np.array([64, 64])
    hashes = (np.array([7, 8]), np.array([7, 9]))
    trace = Trace(
        np.array([0.0, 1.0]), lengths, lengths, prefix_hashes=hashes, prefix_block_tokens=32
    )
    one, two = make_asks(LoadConfig(), trace, 1.0, longest=4096)
    assert one.words[:32] == two.words[:32]
    assert one.words[32:] != two.words[32:]
    again = make_asks(LoadConfig(), trace, 1.0, longest=4096, salt=1)[0]
    assert again.words[:8] != one.words[:8], "what another replay has left in caches is no help"


class Handler(BaseHTTPRequestHandler):
    """Answers with two events and the token counts; every prompt of one word is refused.

    So is every prompt above a hundred words while `power_of_two` decides. While `uncounted` does,
    tokens are not counted.
    """

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "a"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "policy" in body:
            self.server.policy = body["policy"]
            self.send_response(200)
            self.end_headers()
            return
        num_words = len(body["prompt"].split())
        is_refused = num_words == 1 or (self.server.policy == "power_of_two" and num_words > 100)
        self.send_response(503 if is_refused else 200)
        self.end_headers()
        if is_refused:
            self.wfile.write(b'{"error": {"message": "no replica"}}')
            return
        usage = {"prompt_tokens": num_words, "completion_tokens": body["max_tokens"]}
        usage = None if self.server.policy == "uncounted" else usage
        for line in (event(choices=[{"text": "a"}]), event(usage=usage), "data: [DONE]"):
            self.wfile.write(f"{line}\n\n".encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.policy = None
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_requests_go_out_when_they_are_due_and_what_fails_counts_as_failed(url, trace):
    config = LoadConfig(url=url, trace=trace, rate_scale=10.0, length_scale=0.01, duration_s=0.25)
    requests = read_requests(config)
    asks = make_asks(config, requests, 1.0, longest=4096)
    asks[1] = replace(asks[1], words=("one",))

    async def send():
        client = Client(config)
        try:
            return await replay(client, asks)
        finally:
            await client.close()

    started_s = time.perf_counter()
    answers, took_s = asyncio.run(send())
    assert time.perf_counter() - started_s >= took_s >= asks[-1].arrival_s
    assert [one.failure for one in answers] == [None, "503: no replica", None]
    assert [one.prompt_tokens for one in answers] == [10, 0, 10]
    found = summarise(asks, answers, took_s, slo_s=60.0)
    assert (found["requests"], found["completed"], found["failed"]) == (3, 2, 1)
    assert found["mean_response_s"] >= found["mean_ttft_s"] > 0


@pytest.mark.slow
def test_with_advance_every_repeat_sends_the_next_requests(url, trace, tmp_path):
    path = tmp_path / "rows.json"
    common = ("--url", url, "--trace", trace, "--slo-response-s", 60)
    speed = ("--rate-scale", 20, "--duration-s", 0.24, "--repeats", 2, "--json", path)
    found = []
    for more in ((), ("--advance",)):
        call(load_script("pipelines/replay.py"), *common, *speed, *more)
        found.append(json.loads(path.read_text())["rows"][0])
    assert [row["requests"] for row in found] == [10, 10]
    assert [row["failed"] for row in found] == [0, 0]
    # Prompts of 1000 to 1004 tokens twice; then those, and the next five.
    assert [row["mean_prompt_tokens"] for row in found] == [1002.0, 1004.5]


def test_a_gateway_that_does_not_answer_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    sentence = refusal(load_script("pipelines/replay.py"), "--url", url, "--duration-s", 0.5)
    assert sentence.startswith(f"replay: no answer from the gateway at {url}: ")


def test_a_baseline_that_never_decides_is_refused_before_anything_is_sent(url, trace):
    options = ("--url", url, "--trace", trace, "--slo-response-s", 60, "--duration-s", 0.5)
    sentence = refusal(load_script("pipelines/replay.py"), *options, "--baseline", "sed")
    assert sentence == "replay: baseline 'sed' does not decide; name it in --compare, too"


def test_an_endpoint_that_counts_no_tokens_is_refused_as_prompts_cannot_have_their_lengths(url):
    async def measure():
        client = Client(LoadConfig(url=url))
        try:
            await client.switch("uncounted")
            return await client.words_per_token()
        finally:
            await client.close()

    with pytest.raises(ValueError, match="counts no tokens"):
        asyncio.run(measure())


def test_a_policy_that_cannot_be_simulated_is_refused_before_anything_is_sent(url, trace):
    options = ("--url", url, "--trace", trace, "--slo-response-s", 60, "--duration-s", 0.5)
    more = ("--simulate", "conversation_mixed_gpus", "--compare", "sed,candidate")
    sentence = refusal(load_script("pipelines/replay.py"), *options, *more)
    assert sentence.startswith("replay: unknown policy 'candidate'")


@pytest.mark.slow
def test_what_some_policy_answered_is_simulated_though_the_last_one_answered_nothing(
    url, trace, tmp_path
):
    path = tmp_path / "rows.json"
    options = ("--url", url, "--trace", trace, "--slo-response-s", 60, "--json", path)
    speed = ("--rate-scale", 20, "--duration-s", 0.24, "--compare", "sed,power_of_two")
    call(load_script("pipelines/replay.py"), *options, *speed, "--simulate", "emulated")
    rows = json.loads(path.read_text())["rows"]
    assert [row["failed"] for row in rows] == [0, 5]
    assert all(row["simulated_mean_response_s"] > 0 for row in rows)
    alone = (*options, *speed[:4], "--compare", "power_of_two", "--simulate", "emulated")
    sentence = refusal(load_script("pipelines/replay.py"), *alone)
    assert sentence == "replay: no request was answered, so none can be simulated"


class GatewayHandler(Handler):
    """Also says who decides, and which changes of that there were."""

    def do_GET(self):
        server = self.server
        answer = {
            "/v1/models": {"data": [{"id": "a", "max_model_len": None}]},
            "/v1/policy": {
                "active": server.policy, "sha256": "0" * 12, "slo_response_s": 60.0, "name": "sed",
            },
            "/v1/policies": {"events": server.events},
        }[self.path]  # fmt: skip
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_POST(self):
        super().do_POST()
        if self.server.policy != (self.server.events or [{"policy": "sed@0"}])[0]["policy"][:-2]:
            self.changed(self.server.policy)
        with self.server.lock:
            self.server.num_posts += 1
            self.server.after_post(self)

    def changed(self, policy, what="switched to"):
        event = {"time_s": time.time(), "what": what, "policy": f"{policy}@0", "why": "", "by": ""}
        self.server.events.insert(0, event)


@pytest.fixture
def gateway(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    before = signal.getsignal(signal.SIGTERM)
    server = ThreadingHTTPServer(("127.0.0.1", 0), GatewayHandler)
    server.policy, server.events, server.num_posts = "sed", [], 0
    server.lock, server.after_post = threading.Lock(), lambda handler: None
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
    signal.signal(signal.SIGTERM, before)


def replay_at(gateway, trace, path, **more):
    """Five requests to each policy in a quarter of a second."""
    script, url = load_script("pipelines/replay.py"), f"http://127.0.0.1:{gateway.server_port}"
    sent = {"trace": trace, "rate_scale": 20.0, "duration_s": 0.24, "pause_s": 0.0}
    script.main(script.Args(url=url, json=path, **sent, **more))


def test_a_turn_in_which_somebody_changed_the_policy_is_void(gateway, trace, tmp_path, capsys):
    def after_post(handler):
        # Of 1 + 2 x (1 + 5) + 2 x (1 + 5) requests the tenth is in turn 1 of least_loaded.
        if gateway.num_posts == 10:
            handler.changed("round_robin")
            handler.changed("least_loaded", "rolled back to")

    gateway.after_post = after_post
    path = tmp_path / "rows.json"
    replay_at(gateway, trace, path, compare="sed,least_loaded", repeats=2)
    told = capsys.readouterr()
    assert "turn 1 least_loaded: mean" in told.err
    assert "void: meanwhile the gateway rolled back to least_loaded@0" in told.err
    assert told.err.count("void") == 1
    sed, other = json.loads(path.read_text())["rows"]
    assert (sed["requests"], sed["repeats"], sed["void_turns"]) == (10, 2, 0)
    assert (other["requests"], other["repeats"], other["void_turns"]) == (5, 1, 1)
    assert isinstance(other["delta_mean_fraction"], float), "of the turn that both have"
    assert "violation: response over 60 s (the policy that decides)" in told.out


def test_a_replay_of_another_policy_than_it_began_with_is_void_as_a_whole(gateway, trace, tmp_path):
    def after_post(handler):
        if gateway.num_posts >= 3:
            gateway.policy = "round_robin"

    gateway.after_post = after_post
    path = tmp_path / "rows.json"
    with pytest.raises(SystemExit, match="replay: every turn is void"):
        replay_at(gateway, trace, path, repeats=2)
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_before_an_interrupt_is_printed_and_written(
    gateway, trace, tmp_path, capsys, number
):
    numbers = [number]

    def after_post(handler):
        # Two that are answered at once may count to 14 before either looks.
        if gateway.num_posts >= 13 and numbers:
            os.kill(os.getpid(), numbers.pop())

    gateway.after_post = after_post
    path = tmp_path / "rows.json"
    with pytest.raises(SystemExit, match="replay: interrupted"):
        replay_at(gateway, trace, path, compare="sed,least_loaded", repeats=9)
    rows = json.loads(path.read_text())["rows"]
    assert (rows[0]["policy"], rows[0]["completed"]) == ("sed", 5)
    table = capsys.readouterr().out
    assert "sed" in table
    assert "least_loaded" in table, "some requests of its turn had ended"
    assert gateway.policy == "sed", "it is put back"


def test_an_interrupt_ends_a_replay_although_its_cancellation_is_swallowed(
    gateway, trace, tmp_path, monkeypatch
):
    switch, names = load_generator.Client.switch, []

    async def swallowing(self, policy):
        names.append(policy)
        if len(names) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return await switch(self, policy)

    monkeypatch.setattr(load_generator.Client, "switch", swallowing)
    path = tmp_path / "rows.json"
    with pytest.raises(SystemExit, match="replay: interrupted"):
        replay_at(gateway, trace, path, compare="sed,least_loaded", repeats=9)
    assert names[3:] == ["sed"], "the turn that had begun is the last, and the policy is put back"


def test_what_was_measured_is_written_before_it_is_simulated(
    gateway, trace, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("tokenyard.routing.twin.run_all", interrupted)
    path = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        replay_at(gateway, trace, path, simulate="emulated")
    [row] = json.loads(path.read_text())["rows"]
    assert row["completed"] == 5
    assert row["mean_response_s"] > 0
    assert "simulated_mean_response_s" not in row
    assert "sed" in capsys.readouterr().out


def interrupted(*_):
    raise KeyboardInterrupt


REPLICA = {
    "name": "a", "iteration_s": 0.02, "prefill_token_s": 1e-4, "sequence_s": 1e-4,
    "kv_token_s": 0.0, "max_batch": 8, "token_budget": 256, "kv_capacity_tokens": 50_000.0,
}  # fmt: skip


def scenario_file(folder, classes):
    base = load_scenario("conversation_mixed_gpus").model_dump(
        mode="json", exclude_defaults=True, exclude={"held_out_trace", "fleet"}
    )
    path = folder / "mine.yaml"
    fleet = {"replicas": [REPLICA], "classes": classes}
    path.write_text(yaml.safe_dump({**base, "name": "mine", "fleet": fleet}))
    return path


@pytest.mark.parametrize(
    ("classes", "slo_s", "words", "violations"),
    [
        ([{"name": "x", "ttft_s": 1e-9}, {"name": "y"}], None, "first token over 1e-09 s", 1.0),
        ([{"name": "x", "response_s": 900.0, "tpot_s": 900.0}], None, "per token over 900 s", 0.0),
        ([{"name": "x", "ttft_s": 1e-9}], 900.0, "response over 900 s (--slo-response-s)", 0.0),
    ],
)
def test_violations_are_of_the_same_slos_measured_and_simulated(
    gateway, trace, tmp_path, capsys, classes, slo_s, words, violations
):
    path = tmp_path / "rows.json"
    simulate = str(scenario_file(tmp_path, classes))
    replay_at(gateway, trace, path, simulate=simulate, slo_response_s=slo_s)
    [row] = json.loads(path.read_text())["rows"]
    assert row["slo_violation_fraction"] == violations
    assert row["simulated_slo_violation_fraction"] == violations
    assert words in " ".join(capsys.readouterr().out.split())


def test_differences_are_paired_by_repeat():
    def run(mean_s):
        return {"requests": 2, "mean_response_s": mean_s, "p99_response_s": 1.0,
                "slo_violation_fraction": 0.0}  # fmt: skip

    slow = (1.0, 3.0, 2.0, 2.0, 2.0)
    found = {"sed": [run(x) for x in slow], "champion": [run(x - 0.5) for x in slow]}
    _, row = make_rows(found, "sed", "a trace")
    assert row["requests"] == 10
    assert row["delta_mean_fraction"] == row["delta_mean_ci_low"] == pytest.approx(-0.25)
