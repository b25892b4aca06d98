"""Downloading, against a real HTTP server on this machine."""

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipelines import fetch_traces
from tokenyard.workload.download import SOURCES, DownloadError, Source, fetch
from tokenyard.workload.paths import TRACE_FILES

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + b"".join(
    b"2023-11-16 18:17:%02d,%d,7\r\n" % (i // 60, i) for i in range(3000)
)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class TraceServer(ThreadingHTTPServer):
    """Serves its content under any path but /missing; keeps the Range header of each request."""

    ranges = True
    content = CONTENT
    version = '"1"'
    """Entity tag of the content; None: it tells none."""
    break_after = None
    """Bytes after which the connection is cut."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/trace.csv"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.seen.append(asked)
        content, version = self.server.content, self.server.version
        may = self.server.ranges and self.headers.get("If-Range") in (None, version)
        start = int(re.match(r"bytes=(\d+)-", asked)[1]) if asked and may else 0
        if self.path == "/missing":
            return self.send_error(404)
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if version:
            self.send_header("ETag", version)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : self.server.break_after])

    def log_message(self, *args):
        """Keep the test's output clean."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with TraceServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "new" / "trace.csv"


def part_of(target, content):
    target.parent.mkdir()
    part = target.with_name("trace.csv.part")
    part.write_bytes(content)
    target.with_name("trace.csv.part.version").write_text('"1"')
    return part


def test_a_file_is_fetched_checked_and_announced(server, target):
    progress = []

    checked = fetch(Source((server.url,), SHA256), target, lambda *seen: progress.append(seen))

    assert target.read_bytes() == CONTENT
    assert checked == "sha256"
    assert progress[-1] == (len(CONTENT), len(CONTENT))
    assert [path.name for path in target.parent.iterdir()] == ["trace.csv"]


def test_a_file_that_is_there_is_checked_and_not_fetched_again(server, target):
    source = Source((server.url,), SHA256)
    fetch(source, target)
    fetch(source, target)

    assert len(server.seen) == 1
    target.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match="sha256"):
        fetch(source, target)
    assert target.exists()  # what the user has is the user's


def test_a_broken_connection_is_resumed_where_it_stopped(server, target):
    source = Source((server.url,), SHA256)
    server.break_after = 50_000
    with pytest.raises(DownloadError, match="run again"):
        fetch(source, target)
    assert not target.exists()
    server.break_after = None

    fetch(source, target)

    assert target.read_bytes() == CONTENT
    first, second = server.seen
    assert first is None
    assert 30_000 < int(re.match(r"bytes=(\d+)-", second)[1]) <= 50_000


@pytest.mark.parametrize("version", ['"2"', None])
def test_nothing_is_resumed_that_may_have_changed_since(server, target, version):
    server.break_after = 50_000
    with pytest.raises(DownloadError, match="run again"):
        fetch(Source((server.url,)), target)
    server.break_after = None
    server.content, server.version = CONTENT.replace(b",7", b",8"), version

    fetch(Source((server.url,)), target)

    assert target.read_bytes() == server.content
    assert [path.name for path in target.parent.iterdir()] == ["trace.csv"]


def test_what_came_from_a_server_that_tells_no_version_is_fetched_anew(server, target):
    server.version, server.break_after = None, 50_000
    with pytest.raises(DownloadError, match="run again"):
        fetch(Source((server.url,)), target)
    server.break_after, server.content = None, CONTENT.replace(b",7", b",8")

    fetch(Source((server.url,)), target)

    assert target.read_bytes() == server.content
    assert server.seen == [None, None]


def test_a_server_that_cannot_resume_is_asked_for_the_whole_file(server, target):
    server.ranges = False
    part_of(target, CONTENT[:1000])

    fetch(Source((server.url,), SHA256), target)

    assert target.read_bytes() == CONTENT


def test_a_complete_part_needs_no_more_bytes(server, target):
    part_of(target, CONTENT)

    fetch(Source((server.url,), SHA256), target)

    assert target.read_bytes() == CONTENT
    assert len(server.seen) == 1


def test_a_part_longer_than_the_file_is_thrown_away(server, target):
    part_of(target, CONTENT + b"more")

    fetch(Source((server.url,), SHA256), target)

    assert target.read_bytes() == CONTENT


def test_a_corrupt_file_is_refused_and_removed(server, target):
    part = part_of(target, b"X" * 1000)

    with pytest.raises(DownloadError, match="expected " + SHA256):
        fetch(Source((server.url,), SHA256), target)

    assert not target.exists()
    assert not part.exists()


@pytest.mark.parametrize(("num_requests", "accepted"), [(3000, True), (3001, False)])
def test_without_a_checksum_the_number_of_requests_is_compared(
    server, target, num_requests, accepted
):
    source = Source((server.url,), num_requests=num_requests)

    if accepted:
        assert "no checksum published" in fetch(source, target)
    else:
        with pytest.raises(DownloadError, match="has 3000 requests, expected 3001"):
            fetch(source, target)
    assert target.exists() == accepted


def test_a_file_of_which_nothing_is_known_is_said_to_be_checked_only_while_it_is_fetched(
    server, target
):
    source = Source((server.url,))
    assert fetch(source, target) == "size announced by the server; no checksum published"
    target.write_bytes(CONTENT[:1000])
    assert fetch(source, target) == "nothing; it was there, and no checksum is published"


def test_the_next_address_is_tried_when_one_fails(server, target):
    missing = server.url.replace("trace.csv", "missing")

    fetch(Source((missing, server.url), SHA256), target)

    assert target.read_bytes() == CONTENT
    with pytest.raises(DownloadError, match="HTTP 404"):
        fetch(Source((missing,)), target.with_name("other.csv"))


def test_every_published_trace_has_a_source_and_a_file_name():
    assert set(SOURCES) == set(TRACE_FILES)


def test_without_a_network_the_script_ends_with_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    nobody = Source(("http://127.0.0.1:1/trace.csv",))
    monkeypatch.setattr(fetch_traces, "SOURCES", {"azure_code": nobody})

    with pytest.raises(SystemExit) as stopped:
        fetch_traces.main(fetch_traces.Args(traces=("azure_code",), folder=tmp_path))

    sentence = stopped.value.code  # a text makes the exit code 1
    assert sentence.startswith("fetch_traces: cannot reach 127.0.0.1:1: is there a network?")
    assert "\n" not in sentence


def test_the_script_prints_and_writes_what_it_fetched(server, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fetch_traces, "SOURCES", {"azure_code": Source((server.url,), SHA256)})
    result = tmp_path / "result.json"

    fetch_traces.main(fetch_traces.Args(traces=("azure_code",), folder=tmp_path, json=result))

    assert "AzureLLMInferenceTrace_code.csv" in capsys.readouterr().out
    assert '"checked": "sha256"' in result.read_text()


def test_an_unknown_trace_lists_the_known_ones():
    with pytest.raises(SystemExit, match="azure_conv_1week"):
        fetch_traces.main(fetch_traces.Args(traces=("azure",)))
