"""A fleet from what runs: the replicas behind a gateway, or those that Prometheus knows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tokenyard.routing.fleet import MeasuredReplica
from tokenyard.routing.prometheus import Row, read_vllm
from tokenyard.routing.scenario import Scenario


def write_live(
    url: str, out: Path, base: Scenario, model: str | None = None, token: str | None = None
) -> tuple[list[Row], str]:
    """Write the scenario of the replicas behind a URL to a file (.yaml), by which it is named.

    Traffic is that of `base`, and so are the SLOs where the URL tells none. `token` is by default
    TOKENYARD_TOKEN where that is set.

    Returns:
        The replicas, a row each, and where profiles and SLOs are from.

    Raises:
        OSError, ValueError: As of `read_replicas`.
    """
    rows, classes = read_replicas(url, token or os.environ.get("TOKENYARD_TOKEN"), model)
    live = live_scenario(base, rows, classes, out.stem)
    out.write_text(yaml.safe_dump(live, sort_keys=False), encoding="utf-8")
    return rows, live["description"]


def read_replicas(url: str, token: str | None, model: str | None) -> tuple[list[Row], list[Row]]:
    """Ask a gateway or Prometheus for replicas, a row each, and for classes of requests.

    What has no `/v1/pools` is taken for a Prometheus server that scrapes vLLM.

    Raises:
        OSError: Nothing answers.
        ValueError: It knows of no replica, serves several models of which none is named, or is
            neither of both.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def get(path: str, params: dict[str, str] | None = None) -> httpx.Response:
        return httpx.get(f"{url.rstrip('/')}{path}", params=params, headers=headers, timeout=60)

    def ask(path: str, params: dict[str, str]) -> Any:
        answer = get(f"/api/v1/{path}", params)
        try:
            return answer.json()["data"]["result"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"no gateway or Prometheus at {url}: {answer.status_code}") from None

    try:
        answer = get("/v1/pools")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return read_vllm(ask, model), []
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(f"no answer from {url}: {error}") from error
    try:
        body = answer.json()
        models = sorted({replica["model"] for replica in body["replicas"] if "model" in replica})
        if len(models) > 1 and model is None:
            raise ValueError(f"the gateway at {url} serves {', '.join(models)}: give --model NAME")
        chosen = [replica for replica in body["replicas"] if model in (None, replica.get("model"))]
        rows = _measured(chosen)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"what answers at {url} is no gateway: it tells no replicas") from None
    if not rows:
        of = "" if model is None else f" of model {model!r}; it serves {', '.join(models)}"
        raise ValueError(f"the gateway at {url} knows of no replica{of or ' yet'}")
    return rows, body.get("classes", [])


def _measured(replicas: list[dict[str, Any]]) -> list[Row]:
    """Replicas by pool, numbered there."""
    number: Counter[str] = Counter()
    rows = []
    for fields in sorted(replicas, key=lambda fields: (fields["pool"], fields["replica_id"])):
        profile, pool = dict(fields["profile"]), fields["pool"]
        source = profile.pop("source")
        replica = MeasuredReplica(name=f"{pool}-{number[pool]}", **profile)
        number[pool] += 1
        rows.append({"table": "replicas", **replica.model_dump(), "source": source})
    return rows


def live_scenario(
    base: Scenario, replicas: Sequence[Row], classes: Sequence[Row], name: str
) -> dict[str, Any]:
    """Return the fields of a scenario with the traffic of `base`, other replicas and other SLOs.

    Raises:
        ValueError: `base` has servers that do not batch.
    """
    fields = base.model_dump(mode="json", exclude_defaults=True, exclude={"held_out_trace"})
    fleet = base.required_fleet.model_dump(mode="json", exclude_defaults=True, exclude={"classes"})
    keys = MeasuredReplica.model_fields
    fleet["replicas"] = [{key: row[key] for key in keys if key in row} for row in replicas]
    slo = f"SLO: a response in {base.slo_response_s:g} s, of {base.name}, as no other is told."
    if classes:
        known = ("name", "response_s", "ttft_s", "tpot_s", "max_wait_s")
        fleet["classes"] = [
            {key: service_class[key] for key in known if service_class.get(key)}
            for service_class in classes
        ]
        fields["slo_response_s"] = classes[0]["response_s"]
        slo = "SLOs: the gateway's."
        if len(classes) > 1:
            slo += " How many requests each class has is not known: give each its `share`."
    sources = Counter(row["source"] for row in replicas)
    profiles = " and ".join(f"{count} as {source}" for source, count in sources.items())
    description = f"Profiles of replicas: {profiles}. Traffic: {base.name}. {slo}"
    return {**fields, "name": name, "description": description, "fleet": fleet}
