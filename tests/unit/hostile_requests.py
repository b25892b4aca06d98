"""Requests that no client would write: odd JSON, odd heads, odd framing; from a seed."""

import json
import random

USER, ADMIN = "a-token-of-callers", "a-token-of-admins"
NUMBERS = (
    "-1", "0", "1e999", "-1e999", "NaN", "Infinity", "1.5", str(2**63), str(-(2**63) - 1),
    str(2**64), "9" * 4301, "9" * 20_000, "1e-400", "0x10", "00", "--1", "1.", "true", "null",
)  # fmt: skip
TEXTS = (
    b'""', b'"\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\xc3\x28"', b'"\xed\xa0\x80"',
    '"\u2028\u0085\ufeff\u202e"'.encode(), b'"' + b"a" * 70_000 + b'"', b'"\x01"', b'"\\x"',
    b'"../../etc/passwd.npz"', b'"/dev/zero.npz"', b'"{{ x.__class__ }}"', b'"a', b"'a'",
)  # fmt: skip
SHAPES = (
    b"[]", b"{}", b"[[]]", b"[1,\"a\",null]", b"{\"\":{}}", b"[" * 2000, b"[" * 2000 + b"]" * 2000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000, b"[" + b"-1," * 5000 + b"-1]", b"[,]", b"{]",
    b'{"a":1,"a":2}', b"[" + b'{"x":1},' * 2000 + b"{}]", b"", b" ", b"\xef\xbb\xbf1",
)  # fmt: skip
SNAPSHOT = {
    "replica_id": "a", "tokens_per_s": 100.0, "num_slots": 4, "max_concurrency": 4,
    "num_waiting": 0, "num_running": 0, "tokens_in_flight": 0.0,
}  # fmt: skip
TASK = {"model": "m", "prompt": "hello", "max_tokens": 4, "stream": False, "stop": ["a"]}
BODIES = (
    ("/v1/completions", TASK),
    ("/v1/completions", TASK | {"stream": True, "temperature": 0.5, "seed": 1, "n": 1}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    ("/v1/completions", {"model": "ours", "prompt": [1, 2, 3], "max_tokens": 4, "top_p": 1.0}),
    ("/v1/embeddings", {"model": "m", "input": ["a", "b"]}),
    ("/v1/responses", {"model": "m", "input": "a", "max_output_tokens": 4}),
    ("/v1/score", {"model": "m", "text_1": "a", "text_2": ["b"]}),
    ("/tokenize", {"model": "m", "prompt": "a"}),
    ("/v1/route", {"request": {"context_tokens": 9}, "snapshots": [SNAPSHOT, SNAPSHOT]}),
    ("/v1/policy", {"policy": "nothing.npz", "explore_fraction": 0.0}),
    ("/v1/policies", {"action": "canary", "policy": "nothing.npz", "share": 0.1}),
)
PATHS = (
    "/", "/healthz", "/health", "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/console",
    "/v1/models/%2e%2e%2f%2e%2e", "/v1/models/%ff%00", "//v1//models", "/v1/../healthz", "/%",
    "/v1/pools?x=%zz&" + "a=1&" * 500, "/v1/policies", "/v1/" + "a" * 9000, "*", "http://a/b",
    "/v1/console?since_s=nan", "/v1/console?since_s=-1", "/v1/models/\u00fc", "",
)  # fmt: skip
METHODS = (
    "GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "post", "",
    "POST",
)  # fmt: skip
HEADERS = (
    b"", b"x-request-id: \xff\xfe\r\n", b"x-request-id: a\r\nx-request-id: b\r\n",
    b"x-request-id: " + b"a" * 30_000 + b"\r\n", b"x-service-tier: \xff\r\n", b"expect: 1\r\n",
    b"x-\xff: 1\r\n", b"no colon\r\n", b": empty\r\n", b" folded: 1\r\n", b"a: b\r\n c\r\n",
    b"x: \x00\r\n", b"traceparent: zz\r\n", b"expect: 100-continue\r\n", b"host: b\r\n",
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: a\r\n", b"a: b\n",
    b"upgrade: h2c\r\nconnection: upgrade\r\n", b"content-type: text/plain; charset=utf-7\r\n",
    b"content-encoding: gzip\r\n", b"x-request-timeout-seconds: nan\r\n", b"te: trailers\r\n",
    b"forwarded: for=127.0.0.1\r\n", b"".join(b"x-%d: v\r\n" % one for one in range(500)),
    b"x-big: " + b"v" * 70_000 + b"\r\n", b"cookie: " + b"a=b; " * 500 + b"\r\n",
)  # fmt: skip
TOKENS = (
    b"", f"authorization: Bearer {USER}\r\n".encode(), f"authorization: bearer {USER}\r\n".encode(),
    b"authorization: Bearer wrong\r\n", b"authorization: \xff\r\n", b"authorization:\r\n",
    f"authorization: Bearer {ADMIN}\r\n".encode(), f"authorization: Basic {USER}\r\n".encode(),
)  # fmt: skip
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET /\r\n\r\n", b"\r\n" * 50, b"\x00" * 500,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
    b"GET /healthz HTTP/1.1\nhost: a\n\n", b"GET  /healthz  HTTP/1.1\r\n\r\n", b"HTTP/1.1 200\r\n",
)  # fmt: skip


class HostileRequests:
    """Bytes of one request after another; the same ones for the same seed."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def make(self):
        """Bytes of one request; not all have an end."""
        kind = self._random.random()
        if kind < 0.6:
            return self._posted(*self._odd_body())
        if kind < 0.75:
            return self._asked()
        if kind < 0.95:
            return self._ill_framed(*self._odd_body())
        return self._random.choice(GARBAGE)

    def split(self, data):
        """Cut a request into pieces as a network might."""
        num = self._random.choice((1, 1, 1, 2, 5))
        ends = sorted(self._random.randrange(len(data) + 1) for _ in range(num - 1))
        return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True) if b > a]

    def _odd_body(self):
        path, fields = self._random.choice(BODIES)
        if self._random.random() < 0.1:
            return path, self._value()
        if self._random.random() < 0.2:
            return path, self._corrupted(json.dumps(fields).encode())
        # The name is replaced after writing, as what stands there may be no JSON.
        mark = "@" + str(self._random.random())
        text = json.dumps(self._marked(fields, mark)).encode()
        return path, text.replace(f'"{mark}"'.encode(), self._value())

    def _marked(self, fields, mark):
        """Put the mark in place of one value, at any depth, or beside all."""
        if isinstance(fields, list) and fields and self._random.random() < 0.8:
            at = self._random.randrange(len(fields))
            return [*fields[:at], self._marked(fields[at], mark), *fields[at + 1 :]]
        if isinstance(fields, dict) and fields and self._random.random() < 0.95:
            name = self._random.choice([*fields, "unknown"])
            return fields | {name: self._marked(fields.get(name), mark)}
        return mark

    def _value(self):
        kind = self._random.choice((NUMBERS, TEXTS, SHAPES))
        found = self._random.choice(kind)
        return found.encode() if isinstance(found, str) else found

    def _corrupted(self, text):
        data = bytearray(text)
        for _ in range(self._random.randint(1, 4)):
            at = self._random.randrange(len(data))
            data[at : at + self._random.randint(0, 3)] = self._random.randbytes(
                self._random.randint(0, 3)
            )
        return bytes(data)

    def _head(self, method, path, extra):
        more = b"".join(self._random.choices(HEADERS, weights=[40, *[1] * (len(HEADERS) - 1)], k=2))
        first = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n".encode()
        return first + self._random.choice(TOKENS) + more + extra + b"\r\n"

    def _posted(self, path, body):
        return self._head("POST", path, b"content-length: %d\r\n" % len(body)) + body

    def _asked(self):
        path = self._random.choice([*PATHS, *(path for path, _ in BODIES)])
        return self._head(self._random.choice(METHODS), path, b"")

    def _ill_framed(self, path, body):
        length = b"content-length: %b\r\n"
        chunked = b"transfer-encoding: chunked\r\n"
        chunk = b"%x\r\n%b\r\n" % (len(body), body)
        extra, data = self._random.choice([
            (length % b"-5", body), (length % b"1e3", body), (length % (b"9" * 30), body),
            (length % b"%d" % (len(body) + 9), body), (length % b"5" + length % b"6", body),
            (length % b"5" + chunked, chunk), (chunked, b"ZZ\r\n" + body), (chunked, body),
            (chunked, chunk), (chunked, chunk + b"0\r\n\r\n"), (chunked, b"0\r\n\r\n"),
            (chunked, b"f" * 20 + b"\r\n" + body), (chunked, b"-1\r\n" + body),
            (chunked, b"5;" + b"a" * 5000 + b"\r\nhello\r\n0\r\n\r\n"), (b"", body),
            (chunked, chunk + b"0\r\nx: y\r\n\r\n"), (chunked + chunked, chunk + b"0\r\n\r\n"),
            (b"transfer-encoding: gzip, chunked\r\n", chunk + b"0\r\n\r\n"),
            (length % b"%d" % max(len(body) - 3, 0), body), (length % b"99999999999", body),
        ])  # fmt: skip
        return self._head("POST", path, extra) + data
