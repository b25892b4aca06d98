"""An endpoint that answers as many tokens as it is asked for, on OpenAI's routes."""

import http.server
import json
import threading
from contextlib import contextmanager

METRICS = """\
vllm:num_requests_waiting{engine="0"} 0
vllm:num_requests_running{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""


class OpenAiEndpoint(http.server.BaseHTTPRequestHandler):
    """Every token is a word."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *args):
        pass

    def do_GET(self):
        cards = {"object": "list", "data": [{"id": one} for one in self.server.models]}
        body = json.dumps(cards) if self.path == "/v1/models" else METRICS
        self._head("application/json", len(body))
        self.wfile.write(body.encode())

    def do_POST(self):
        body = json.loads(self._body())
        self.server.asked.append(body)
        number = body.get("max_completion_tokens") or body.get("max_tokens") or 4
        answer = _Answer(body, "messages" in body, number)
        if not body.get("stream"):
            whole = json.dumps(answer.whole()).encode()
            self._head("application/json", len(whole))
            self.wfile.write(whole)
            return
        self._head("text/event-stream; charset=utf-8")
        for event in answer.events():
            self._chunk(b"data: %b\n\n" % json.dumps(event).encode())
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _body(self):
        if self.headers["transfer-encoding"] != "chunked":
            return self.rfile.read(int(self.headers["content-length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size + 2)[:-2]
        self.rfile.readline()
        return body

    def _head(self, kind, length=None):
        self.send_response(200)
        self.send_header("content-type", kind)
        if length is None:
            self.send_header("transfer-encoding", "chunked")
        else:
            self.send_header("content-length", str(length))
        self.end_headers()

    def _chunk(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


class _Answer:
    """`number` tokens to one body."""

    def __init__(self, body, is_chat, number):
        self.is_chat, self.number = is_chat, number
        kind = "chat.completion" if is_chat else "text_completion"
        self.has_usage = (body.get("stream_options") or {}).get("include_usage")
        self.head = {"id": "x", "created": 1, "model": body["model"], "object": kind}

    def whole(self):
        said = "word " * self.number
        choice = {"index": 0, "finish_reason": "length", "logprobs": None}
        message = {"role": "assistant", "content": said}
        choice |= {"message": message} if self.is_chat else {"text": said}
        return {**self.head, "choices": [choice], "usage": self._usage()}

    def events(self):
        head = self.head | ({"object": "chat.completion.chunk"} if self.is_chat else {})
        for left in range(self.number - 1, -1, -1):
            choice = {"index": 0, "finish_reason": None if left else "length", "logprobs": None}
            delta = {"role": "assistant", "content": "word "}
            choice |= {"delta": delta} if self.is_chat else {"text": "word "}
            yield {**head, "choices": [choice]} | ({"usage": None} if self.has_usage else {})
        if self.has_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _usage(self):
        return {
            "prompt_tokens": 5, "completion_tokens": self.number, "total_tokens": 5 + self.number,
        }  # fmt: skip


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@contextmanager
def an_openai_endpoint(*models):
    """Yield an endpoint's server, and its URL; `models` are what it lists."""
    server = _Server(("127.0.0.1", 0), OpenAiEndpoint)
    server.models, server.asked = models, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
