"""Who changed what and who used what: in the file, in the list, and in the metrics."""

import asyncio
import json
import resource
import stat

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import generate_latest
from pydantic import TypeAdapter
from unit.serve.test_keys import ENTRIES, a_site, bearer, write
from unit.serve.test_serve_allocator import ONE, StaticPlan, World
from unit.serve.test_serve_gateway import a_body

from serve_app.gateway.callers import KeyFile
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.metrics import Metrics
from serve_app.http.allocation import make_router
from serve_app.http.auth import Access
from serve_app.policy.audit_log import ACTOR, AuditLog, Event

OPS, ANN = bearer("sk-ops"), bearer("sk-ann")


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_change_is_written_down_with_its_key_and_only_admins_see_whose(tmp_path):
    write(tmp_path / "keys.yaml", ENTRIES)
    log = AuditLog(tmp_path / "audit" / "changes.jsonl")

    async def run():
        async with a_site(tmp_path / "keys.yaml") as (client, _, gateway, _pools):
            gateway.manager.on_event = log.write

            async def change(path, headers, **body):
                # A server answers each request in a task of its own.
                await asyncio.create_task(client.post(path, json=body, headers=headers))

            await change("/v1/policy", OPS, policy="sed")
            await change("/v1/policy", ANN, policy="round_robin")
            await change("/v1/policies", OPS, action="canary", policy="round_robin")
            # What ends by itself while somebody asks is nobody's.
            gateway.manager.end_experiment("it was worse")
            seen = [(await client.get("/v1/policies", headers=one)).json() for one in (OPS, ANN)]
            return [one["events"] for one in seen]

    for_ops, for_ann = asyncio.run(run())
    log.close()
    found = lines_of(tmp_path / "audit" / "changes.jsonl")
    told = [(one["what"], one["by"]) for one in found]
    assert told == [
        ("switched to", "ops at 10.0.0.1"), ("canary began", "ops at 10.0.0.1"),
        ("canary ended", "gateway"),
    ]  # fmt: skip
    assert [one["by"] for one in for_ops[:3]] == [by for _, by in reversed(told)]
    assert all("by" not in one for one in for_ann)
    assert found[0]["policy"].startswith("sed@")
    assert stat.S_IMODE((tmp_path / "audit" / "changes.jsonl").stat().st_mode) == 0o600
    assert ACTOR.get() == "gateway"


def test_a_line_for_which_there_is_no_room_is_missing_whole_and_told(tmp_path, caplog):
    path = tmp_path / "changes.jsonl"
    whole = (json.dumps({"what": "kept"}) + "\n").encode()
    path.write_bytes(whole)
    log = AuditLog(path)
    most, ever = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, ever))
    try:
        log.write(Event(0.0, "lost", "sed@0", "asked"))
        log._thread.submit(int).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, ever))
    log.write(Event(0.0, "written", "sed@0", "asked"))
    log.close()
    assert [one["what"] for one in lines_of(path)] == ["kept", "written"]
    assert '"what":"lost"' in caplog.text


def test_changes_of_plans_are_written_down_as_those_of_policies():
    noted = []

    async def run():
        api, world = FastAPI(), World(StaticPlan(ONE), start=ONE)
        load = lambda name: (StaticPlan(ONE), world.allocator.origin)  # noqa: E731
        router = make_router(
            world.allocator, Access(None, None, True), load,
            lambda what, of, why: noted.append((what, of, ACTOR.get())),
        )  # fmt: skip
        api.include_router(router)
        transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for body in ({"policy": "planner"}, {"dry_run": True}):
                assert (await client.post("/v1/allocation", json=body)).status_code == 200

    asyncio.run(run())
    who = "somebody at 127.0.0.1"
    assert noted == [("allocation policy set", "planner", who), ("allocation", "dry run", who)]


def test_a_full_file_makes_room_and_the_oldest_lines_go(tmp_path, caplog):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, max_bytes=400)
    for number in range(40):
        log.write(Event(number, "switched to", "sed", "asked", "ops"))
    log.close()
    names = sorted(one.name for one in tmp_path.iterdir())
    assert set(names) >= {f"audit.jsonl.{number}" for number in (1, 2, 3, 4)}
    assert len(names) <= 5
    files = [path.with_name(f"audit.jsonl.{number}") for number in (4, 3, 2, 1)]
    times = [one["time_s"] for file in [*files, path] if file.exists() for one in lines_of(file)]
    assert times == list(range(40))[-len(times) :]
    assert all(file.stat().st_size < 600 for file in files)
    assert not caplog.text


def test_a_disk_that_is_full_stops_nothing_and_is_told(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = AuditLog(tmp_path / "file" / "audit.jsonl")
    log.write(Event(0.0, "switched to", "sed", "asked", "ops"))
    log.close()
    assert caplog.text.count('"by":"ops"') == 1


def test_a_changed_file_says_whose_keys_are_others(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, ENTRIES[:3])
    file = KeyFile(path)
    file.open()
    bob = ENTRIES[1] | {"limits": {"tokens_per_day": 5}}
    write(path, [ENTRIES[0], bob, ENTRIES[3]], without_key={})
    assert file.reload()
    assert file.difference == "added all; removed ops; changed bob; other limits without a key"


def test_events_of_an_earlier_release_can_be_read():
    old = {"time_s": 1.0, "what": "promoted", "policy": "a@b", "why": "asked"}
    assert TypeAdapter(Event).validate_python(old).by == "gateway"


def test_what_tenants_use_is_counted_by_tenant(tmp_path):
    write(tmp_path / "keys.yaml", [ENTRIES[0] | {"limits": {"requests_per_day": 3}}, ENTRIES[3]])

    async def run():
        async with a_site(tmp_path / "keys.yaml") as (client, file, gateway, pools):
            gateway.metrics.know_tenants(file.value.tenants)
            for number in range(4):
                if number == 2:
                    for pool in pools.values():
                        pool.script.append((0, ReplicaFull("it is full")))
                await client.post("/v1/completions", json=a_body(), headers=ANN)
            await client.post("/v1/completions", json=a_body(), headers=bearer("sk-all"))
            value = gateway.metrics.registry.get_sample_value
            return {
                (name, tenant): value(f"tokenyard_tenant_{name}_total", {"tenant": tenant})
                for name in ("requests", "prompt_tokens", "output_tokens", "refused")
                for tenant in ("red", "none", "other")
            }

    found = asyncio.run(run())
    assert {key: value for key, value in found.items() if value} == {
        ("requests", "red"): 4, ("requests", "none"): 1, ("refused", "red"): 1,
        ("prompt_tokens", "red"): 15, ("output_tokens", "red"): 6,
        ("prompt_tokens", "none"): 5, ("output_tokens", "none"): 2,
    }  # fmt: skip


@pytest.mark.parametrize("num_tenants", [3, 5000])
def test_tenants_are_at_most_so_many_series(num_tenants):
    metrics = Metrics()
    metrics.know_tenants(f"t{number}" for number in range(num_tenants))
    for number in range(6000):
        metrics.of_tenant(f"t{number}").requests.inc()
    metrics.of_tenant("").requests.inc()
    text = generate_latest(metrics.registry).decode()
    series = [line for line in text.splitlines() if line.startswith("tokenyard_tenant_requests_t")]
    assert len(series) == min(num_tenants, 256) + 2
    assert sum(float(line.split()[-1]) for line in series) == 6001
