"""Entries by URL: what is sent, what is read, and what becomes of decisions that fail."""

import contextlib
import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from serve_app.http.decide_schema import RouteMessage
from tokenyard.routing import policy_url
from tokenyard.routing.arena import FAILED, MEAN, Cell, Entry, Match, Size, play, play_all
from tokenyard.routing.policy_url import PolicyOfUrl, PolicyUrlError
from tokenyard.routing.scenario import load_scenario

TINY = Size(2, 40)


@pytest.fixture
def server():
    """Answer with what `answers` makes of the number of requests so far and the message."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            RouteMessage.model_validate_json(body)
            self.server.asked += 1
            self.server.path = self.path
            status, answer = self.server.answers(self.server.asked, json.loads(body))
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            # Who waited too long has hung up.
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        def log_message(self, *args):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked = 0
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def least_loaded(asked, message):
    waits = [
        one["num_waiting"] + one["num_running"] + (one["tokens_in_flight"] > 0)
        for one in message["snapshots"]
    ]
    return 200, {"index": waits.index(min(waits))}


def matched(server, scenario: str) -> Match:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    cell = Cell("cell", load_scenario(scenario), 0.5)
    return Match(Entry(url, "url", url), cell, TINY, 1)


@pytest.mark.parametrize("scenario", ["poisson_085", "conversation_mixed_gpus"])
def test_the_message_is_that_of_the_routing_api_and_the_answer_decides(server, scenario):
    server.answers = least_loaded
    found = play(matched(server, scenario))
    assert server.asked == TINY.streams * TINY.requests
    assert found[MEAN].shape == (TINY.streams,)
    np.testing.assert_array_equal(found[FAILED], 0.0)


@pytest.mark.parametrize(
    ("given", "asked"),
    [("", "/v1/route"), ("/", "/v1/route"), ("/a/b", "/a/b"), ("?key=1", "/v1/route?key=1")],
)
def test_path_and_query_are_those_that_were_given(server, given, asked):
    server.answers = least_loaded
    url = f"http://127.0.0.1:{server.server_address[1]}{given}"
    cell = Cell("cell", load_scenario("poisson_085"), 0.5)
    play(Match(Entry(url, "url", url), cell, Size(1, 2), 1))
    assert server.path == asked


@pytest.mark.parametrize(
    "answer", [(500, {}), (200, {"index": 99}), (200, {"index": True}), (200, b"no"), (200, [])]
)
def test_decisions_that_fail_are_counted_and_go_round_robin(server, answer):
    server.answers = lambda asked, message: (
        answer if asked % 4 == 0 else least_loaded(asked, message)
    )
    found = play(matched(server, "poisson_085"))
    assert found[FAILED].mean() == pytest.approx(0.25)
    assert np.isfinite(found[MEAN]).all()


def test_a_server_that_ends_idle_connections_fails_no_decision(server):
    server.RequestHandlerClass.timeout = 0.05

    def after_a_pause(asked, message):
        time.sleep(0.1)
        return least_loaded(asked, message)

    # Streams ask in turn: while one waits for its answer the connection of the other is idle.
    server.answers = after_a_pause
    match = replace(matched(server, "poisson_085"), size=Size(2, 8))
    np.testing.assert_array_equal(play(match)[FAILED], 0.0)


def test_who_never_answers_in_time_is_given_up_and_named(server, monkeypatch):
    monkeypatch.setattr(policy_url, "MOST_DECISION_S", 0.05)

    def late(asked, message):
        time.sleep(0.3)
        return least_loaded(asked, message)

    server.answers = late
    match = matched(server, "poisson_085")
    with pytest.raises(PolicyUrlError, match=r"failed in a row: TimeoutError"):
        play(match)
    # Both streams ask in turn.
    assert server.asked <= TINY.streams * policy_url.MOST_IN_A_ROW


def test_a_url_where_nobody_listens_loses_nothing_of_the_others():
    cell = Cell("cell", load_scenario("poisson_085"), 0.5)
    nobody = Entry("http://127.0.0.1:9", "url", "http://127.0.0.1:9")
    matches = [Match(one, cell, TINY, 1) for one in (nobody, Entry("sed", "rule", "sed"))]
    failed, played = play_all(matches, map)
    assert "ConnectionRefusedError" in failed
    assert played[MEAN].shape == (TINY.streams,)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "x.py"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(PolicyUrlError, match="no URL"):
        PolicyOfUrl(url)
