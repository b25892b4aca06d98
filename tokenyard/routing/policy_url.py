"""An entry of the arena: a policy behind a URL that answers `POST /v1/route`.

docs/serving/embedding.md has the format. What the simulator's router may know is sent as
JSON; only the `index` of the answer is read. One server answers for all streams: their clocks all
begin near 0.
"""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from tokenyard.routing.types import ReplicaSnapshot, Request

MOST_DECISION_S = 1.0
"""Time that a decision may take, seconds."""
MOST_IN_A_ROW = 5
"""Decisions that may fail one after the other before the entry is given up."""


class PolicyUrlError(ValueError):
    """A URL that is not one, or behind which nobody decides; the text says how."""


def is_url(text: str) -> bool:
    """Whether a policy is named by its URL."""
    return text.startswith(("http://", "https://"))


class PolicyOfUrl:
    """Asks for every decision; where there is no answer in time the request goes round robin."""

    def __init__(self, url: str) -> None:
        """Ask `url`, or `/v1/route` of it where it has no path.

        Raises:
            PolicyUrlError: It is no URL of HTTP.
        """
        parts = urlsplit(url)
        if not (is_url(url) and parts.hostname):
            raise PolicyUrlError(f"{url!r} is no URL; give http://HOST:PORT/v1/route")
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=MOST_DECISION_S)
        self._url, self._path = url, parts.path.rstrip("/") or "/v1/route"
        if parts.query:
            self._path += "?" + parts.query
        self._asked, self._in_a_row = 0, 0
        self.num_failed = 0
        """Decisions that failed."""
        self.first_failure = ""
        """What the first of them failed of."""

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return what the server chooses.

        Raises:
            PolicyUrlError: `MOST_IN_A_ROW` decisions failed one after the other.
        """
        self._asked += 1
        try:
            chosen = self._ask(request, snapshots)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._fail(f"{type(error).__name__}: {error}")
            return self._asked % len(snapshots)
        self._in_a_row = 0
        return chosen

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _ask(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        response = self._send(json.dumps(_message(request, snapshots)))
        text = response.read()
        if response.status != http.client.OK:
            raise ValueError(f"{response.status} {text[:200].decode(errors='replace')}")
        answer = json.loads(text)
        index = answer.get("index") if isinstance(answer, dict) else None
        if type(index) is not int or not 0 <= index < len(snapshots):
            raise ValueError(f"index {index!r:.50} for {len(snapshots)} replicas")
        return index

    def _send(self, body: str) -> http.client.HTTPResponse:
        """Send, on a new connection where the server has ended the one that stood idle."""
        is_new = self._connection.sock is None
        try:
            return self._send_once(body)
        except ConnectionError:
            if is_new:
                raise
        self._connection.close()
        return self._send_once(body)

    def _send_once(self, body: str) -> http.client.HTTPResponse:
        self._connection.request("POST", self._path, body, {"Content-Type": "application/json"})
        return self._connection.getresponse()

    def _fail(self, reason: str) -> None:
        self.num_failed += 1
        self._in_a_row += 1
        self.first_failure = self.first_failure or " ".join(reason.split())[:200]
        # The next request begins with a new connection.
        self._connection.close()
        if self._in_a_row == MOST_IN_A_ROW:
            raise PolicyUrlError(
                f"{self._url}: {MOST_IN_A_ROW} decisions failed in a row: {reason}"
            )


def _message(request: Request, snapshots: Sequence[ReplicaSnapshot]) -> dict[str, Any]:
    """Body of `POST /v1/route`."""
    body = {
        "context_tokens": request.context_tokens,
        "predicted_total_tokens": request.predicted_total_tokens,
        "arrival_s": request.arrival_s,
    }
    return {"request": body, "snapshots": [_snapshot_body(snapshot) for snapshot in snapshots]}


def _snapshot_body(snapshot: ReplicaSnapshot) -> dict[str, Any]:
    """Return a snapshot's JSON fields: NaN becomes null, and queues are left out."""
    fields = asdict(snapshot)
    del fields["queue"]
    for name in ("predicted_wait_s", "mean_response_s"):
        fields[name] = None if math.isnan(fields[name]) else fields[name]
    fields["observed_at_s"] = max(fields["observed_at_s"], 0.0)
    return fields
