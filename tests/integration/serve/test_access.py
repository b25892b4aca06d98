"""Keys, limits, TLS and the audit log of a gateway that Serve runs."""

import asyncio
import json
import time

import httpx
import pytest
import yaml
from integration.serve.test_gateway import HERE, a_pool, save_tiny_tokenizer
from ray import serve
from unit.serve.test_keys import ENTRIES, bearer, write
from unit.serve.test_tls import make, serial_of, trusting

from serve_app.app import GatewayOptions, build_gateway
from serve_app.http.free_port import free_port

NAME = "access"
BODY = {"model": "tiny", "prompt": "one two three four", "max_tokens": 4, "ignore_eos": True}
LIMITED = [ENTRIES[0] | {"limits": {"requests_per_day": 9, "tokens_per_day": 10000}}, ENTRIES[2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def url(folder, ray_cluster):
    write(folder / "keys.yaml", LIMITED)
    gateway = {
        "keys": str(folder / "keys.yaml"), "audit_log": str(folder / "audit.jsonl"),
        "tls": make(folder, 1).model_dump(mode="json"),
    }  # fmt: skip
    cluster = {
        "name": NAME, "description": "A test.", "served_model": "tiny", "explore_fraction": 0,
        "gateway": gateway, "pools": [a_pool("tiny", save_tiny_tokenizer(folder / "model"))],
    }  # fmt: skip
    file, port = folder / "cluster.yaml", free_port()
    file.write_text(yaml.safe_dump(cluster))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        try:
            serve.start(proxy_location="Disabled")
            options = GatewayOptions(cluster=str(file), port=port, state=folder / "state.json")
            serve.run(build_gateway(options), name=NAME, route_prefix=None)
            yield f"https://127.0.0.1:{port}"
        finally:
            serve.shutdown()


def ask(url, folder, key, path="/v1/completions", body=BODY):
    """Ask over a connection of its own."""
    context = trusting_now(folder)
    return httpx.post(f"{url}{path}", json=body, headers=bearer(key), verify=context, timeout=60)


def until(condition, timeout_s=90.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.1)


def trusting_now(folder):
    class Files:
        certificate = folder / "tls.crt"

    return trusting(Files)


def changes(folder):
    file = folder / "audit.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def used(folder):
    """What each key has used; nothing before the state is written for the first time."""
    file = folder / "state.json"
    return json.loads(file.read_text())["parts"]["limits"]["keys"] if file.exists() else {}


def test_a_quota_is_exact_and_survives_in_the_state(url, folder):
    until(lambda: ask(url, folder, "sk-ops", "/v1/tokenize").status_code in (403, 404, 405))
    answers = [ask(url, folder, "sk-ann") for _ in range(12)]
    assert [one.status_code for one in answers] == [200] * 9 + [429] * 3
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "8"
    assert answers[-1].json()["error"]["code"] == "insufficient_quota"
    assert ask(url, folder, "sk-ops").status_code == 403
    assert ask(url, folder, None).status_code == 401
    until(lambda: used(folder).get("ann", {}).get("requests", [0] * 3)[2] == 9)
    page = httpx.get(f"{url}/metrics", verify=trusting_now(folder)).text
    assert 'tokenyard_tenant_requests_total{tenant="red"} 9.0' in page
    assert 'tokenyard_tenant_refused_total{tenant="red"} 3.0' in page


def test_keys_and_certificates_change_while_it_serves_and_changes_are_written_down(url, folder):
    bob = {"name": "bob", "tenant": "blue", "sha256": ENTRIES[1]["sha256"]}
    write(folder / "keys.yaml", [*LIMITED, bob])
    make(folder, 2)
    until(lambda: any(one["why"] == "added bob" for one in changes(folder)))
    port = int(url.rpartition(":")[2])

    until(lambda: asyncio.run(serial_of(port)) == 2)
    assert ask(url, folder, "sk-bob").status_code == 200
    changed = ask(url, folder, "sk-ops", "/v1/policy", {"policy": "round_robin"})
    assert changed.status_code == 200, changed.text
    until(lambda: changes(folder)[-1]["by"] == "ops at 127.0.0.1")
    last = changes(folder)[-1]
    assert (last["what"], last["policy"].partition("@")[0]) == ("switched to", "round_robin")
