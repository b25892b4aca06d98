"""API keys: who may what, and a file of them that changes while it is used."""

import asyncio
import os
import resource
import sys
from contextlib import asynccontextmanager, contextmanager

import httpx
import numpy as np
import pytest
import tyro
import yaml
from unit.serve.test_serve_gateway import FakePool, Letters, a_body, a_cluster

from pipelines import keys as command
from serve_app.cluster import Cluster
from serve_app.gateway.callers import UNLIMITED, ApiKey, Caller, KeyFile, hash_of, read_keys
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.rate_limits import RateLimits
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy.manager import PolicyManager

ENTRIES = [
    {"name": "ann", "tenant": "red", "sha256": hash_of("sk-ann")},
    {"name": "bob", "tenant": "blue", "sha256": hash_of("sk-bob"), "models": ["other"]},
    {"name": "ops", "admin": True, "sha256": hash_of("sk-ops")},
    {"name": "all", "admin": True, "may_generate": True, "sha256": hash_of("sk-all")},
]


@contextmanager
def too_many_open_files():
    """Let this process open none meanwhile."""
    most, ever = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, ever))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, ever))


def write(path, entries, **fields):
    """Replace a file in one step, as everybody should."""
    part = path.with_suffix(".part")
    part.write_text(yaml.safe_dump({"keys": entries, **fields}), encoding="utf-8")
    part.replace(path)


@asynccontextmanager
async def a_site(path, token=None, admin_token=None):
    """Yield a client, the file of keys, the gateway and its pools."""
    tenants = {"red": {"weight": 2}, "blue": {"weight": 1}}
    file, cluster = KeyFile(path), a_cluster(tenants=tenants, gateway={"keys": str(path)})
    access = Access(token, admin_token, keys=file)
    access.open()
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch(cluster.policy)
    pools = {pool.name: FakePool(pool.name) for pool in cluster.pools}
    gateway = Gateway(cluster, manager, pools, limits=RateLimits(access.limits_of))
    api = create_gateway_api(gateway, Letters(), access)
    transport = httpx.ASGITransport(api, client=("10.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client, file, gateway, pools
    manager.stop()


def bearer(key):
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def statuses(client, key):
    """Statuses of generating, looking at all tenants, and changing with a key."""
    headers = bearer(key)
    asked = await client.post("/v1/completions", json=a_body(), headers=headers)
    looked = await client.get("/v1/pools", headers=headers)
    changed = await client.post("/v1/policy", json={"policy": "sed"}, headers=headers)
    return asked.status_code, looked.status_code, changed.status_code


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("sk-ann", (200, 403, 403)),
        ("sk-bob", (403, 403, 403)),
        ("sk-ops", (403, 200, 200)),
        ("sk-all", (200, 200, 200)),
        ("sk-ann ", (200, 403, 403)),
        ("sk-anm", (401, 401, 401)),
        (hash_of("sk-ann"), (401, 401, 401)),
        ("user", (200, 200, 403)),
        ("admin", (200, 200, 200)),
        (None, (401, 401, 401)),
    ],
)
def test_a_key_does_what_its_entry_says_and_tokens_are_keys_of_their_own(tmp_path, key, expected):
    write(tmp_path / "keys.yaml", ENTRIES)

    async def run():
        async with a_site(tmp_path / "keys.yaml", "user", "admin") as (client, *_):
            assert await statuses(client, key) == expected

    asyncio.run(run())


def test_without_a_key_only_what_the_file_allows(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, ENTRIES, without_key={})

    async def run():
        async with a_site(path) as (client, file, *_):
            assert await statuses(client, None) == (200, 403, 403)
            # Whoever gives a key that is wrong should hear of it.
            assert await statuses(client, "sk-old") == (401, 401, 401)
            write(path, ENTRIES)
            assert file.reload()
            assert await statuses(client, None) == (401, 401, 401)

    asyncio.run(run())


def test_a_request_knows_its_tenant_where_it_is_placed(tmp_path):
    write(tmp_path / "keys.yaml", ENTRIES)
    seen = []

    async def run():
        async with a_site(tmp_path / "keys.yaml", "user") as (client, _, gateway, _pools):
            pick = gateway._placement.pick

            def noted(answer, *by_ray):
                seen.append((answer.request.tenant, answer.request.caller.key))
                return pick(answer, *by_ray)

            gateway._placement.pick = noted
            for key in ("sk-ann", "user", "sk-all"):
                # Where there are keys nobody is believed who names a tenant.
                headers = bearer(key) | {"x-tenant": "blue"}
                await client.post("/v1/completions", json=a_body(), headers=headers)

    asyncio.run(run())
    assert seen == [("red", "ann"), ("default", "token"), ("default", "all")]


def test_a_changed_file_counts_at_once_and_a_broken_one_keeps_the_keys_and_says_so(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, ENTRIES[:1])

    async def run():
        async with a_site(path) as (client, file, *_):
            assert not file.reload()
            path.write_text("keys: [{name: x", encoding="utf-8")
            assert file.reload()
            assert "no YAML, line" in file.problem
            assert (await statuses(client, "sk-ann"))[0] == 200
            assert not file.reload()  # It is not told again and again.
            path.unlink()
            assert file.reload()
            assert "No such file" in file.problem
            write(path, ENTRIES[2:])
            assert file.reload()
            assert file.problem is None
            assert (await statuses(client, "sk-ann"))[0] == 401
            assert (await statuses(client, "sk-ops"))[2] == 200

    asyncio.run(run())


def test_a_file_is_looked_at_again_and_again_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("serve_app.watched_file._LOOK_EVERY_S", 0.01)
    path = tmp_path / "keys.yaml"
    write(path, ENTRIES[:1])

    async def run():
        file, told = KeyFile(path), asyncio.Event()
        file.open()
        watching = asyncio.create_task(file.watch(told.set))
        write(path, ENTRIES)
        async with asyncio.timeout(10):
            await told.wait()
        watching.cancel()
        return set(file.value.by_name)

    assert asyncio.run(run()) == {"ann", "bob", "ops", "all"}


def test_nothing_in_a_file_ends_the_looking_so_that_a_key_is_still_withdrawn(tmp_path, monkeypatch):
    monkeypatch.setattr("serve_app.watched_file._LOOK_EVERY_S", 0.01)
    path = tmp_path / "keys.yaml"
    write(path, ENTRIES)

    async def run():
        file, told = KeyFile(path), asyncio.Event()
        file.open()
        watching = asyncio.create_task(file.watch(told.set))
        try:
            path.write_text("keys: !!int ''", encoding="utf-8")
            async with asyncio.timeout(10):
                await told.wait()
                assert "no YAML" in file.problem
                write(path, ENTRIES[:1])
                while file.value.find("sk-bob") is not None:
                    await asyncio.sleep(0.01)
        finally:
            watching.cancel()

    asyncio.run(run())


def test_a_key_is_withdrawn_once_the_file_can_be_read_though_it_is_the_same_by_then(tmp_path):
    """As where a gateway had too many open files in the second in which it looked."""
    path = tmp_path / "keys.yaml"
    write(path, ENTRIES)
    file = KeyFile(path)
    file.open()
    write(path, ENTRIES[:1])
    with too_many_open_files():
        assert file.reload()
        assert not file.reload()
    assert "Too many open files" in file.problem
    assert file.reload()
    assert file.problem is None
    assert file.value.find("sk-bob") is None
    assert not file.reload()


def an_entry(name, digit, rest="admin: true"):
    return f"{{name: {name}, sha256: {digit * 64}, {rest}}}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("keys: [{name: a, tenant: t, sha256: sk-secret}]", "keys.0.sha256"),
        (f"keys: [{an_entry('a', 'a', 'admin: false')}]", "give the tenant"),
        (f"keys: [{an_entry('token', 'a')}]", "'token' is the environment's"),
        (f"keys: [{an_entry('a', 'a')}, {an_entry('a', 'b')}]", "name 'a' appears more than once"),
        (f"keys: [{an_entry('a', 'a')}, {an_entry('b', 'a')}]", "appears more than once"),
        (f"keys: [{an_entry('a', 'a', 'limits: {requests_per_hour: 1}')}]", "requests_per_hour"),
        ("without_key: {requests_per_minute: 0}", "requests_per_minute"),
        ("- a", "it: "),
        ("\x00", "no YAML"),
        ("keys: !!bool perhaps", "no YAML"),
        ("keys: !!int ''", "no YAML"),
        ("keys: !!timestamp soon", "no YAML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_place_and_without_secrets(tmp_path, text, reason):
    path = tmp_path / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="keys file") as refused:
        read_keys(path)
    assert reason in str(refused.value)
    assert "sk-secret" not in str(refused.value)


def test_a_cluster_file_names_the_file_where_the_gateway_runs():
    with pytest.raises(ValueError, match="must begin with /"):
        a_cluster(gateway={"keys": "keys.yaml"})
    cluster = a_cluster(gateway={"keys": "/etc/keys.yaml"})
    assert Cluster.model_validate(cluster.model_dump(mode="json")) == cluster


def test_a_key_that_is_made_is_printed_once_and_its_entry_opens_the_gateway(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["keys.py"])
    options = ["new", "--tenant", "red", "--name", "eve", "--limits.requests-per-minute", "60"]
    result = tmp_path / "made.json"
    command.main(tyro.cli(command.Args, args=[*options, "--json", str(result)]))
    key, entry = capsys.readouterr().out.split("\n", 1)
    key = key.split()[-1]
    assert len(key) > 40
    assert key not in result.read_text()
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + entry.partition("of keys:\n\n")[2])
    found = read_keys(path).find(key)
    assert (found.name, found.tenant, found.limits.requests_per_minute) == ("eve", "red", 60)
    with pytest.raises(SystemExit, match=r"^keys: give the tenant of a key that is no admin's"):
        command.main(tyro.cli(command.Args, args=["new", "--name", "eve"]))


def test_a_key_file_is_found_through_links_as_secrets_are_mounted(tmp_path):
    for number, entries in enumerate((ENTRIES[:1], ENTRIES[1:2])):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "keys.yaml", entries)
    (tmp_path / "now").symlink_to("0")
    file = KeyFile(tmp_path / "now" / "keys.yaml")
    file.open()
    (tmp_path / "next").symlink_to("1")
    os.replace(tmp_path / "next", tmp_path / "now")
    assert file.reload()
    assert set(file.value.by_name) == {"bob"}


def test_limits_of_a_key_that_is_not_known_are_not_none(tmp_path):
    write(tmp_path / "keys.yaml", ENTRIES)
    access = Access(None, keys=KeyFile(tmp_path / "keys.yaml"))
    access.open()
    assert access.limits_of(Caller("red", "ann")) is None
    with pytest.raises(LookupError):
        access.limits_of(Caller("red", "gone"))
    with pytest.raises(LookupError):
        access.limits_of(Caller())
    assert Access(None).limits_of(Caller()) == UNLIMITED
    assert ApiKey.of_token("token", "x").generates
