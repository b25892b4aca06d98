"""What deploy.py does before and after Ray: checks of addresses, and what it prints."""

import os
import shlex
import socket

import psutil
import pytest
import ray
from scripts import refusal

from pipelines import deploy
from serve_app import process
from serve_app.http.decide_schema import RouteMessage
from serve_app.http.free_port import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_of_either_kind_is_checked_and_told_as_callers_write_it(host, capsys):
    port = free_port()
    deploy._check_port(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family):
        with pytest.raises(ValueError, match=f"cannot listen on {host}:{port}"):
            deploy._check_port(host, port)
    args = deploy.Args(cluster=deploy.DECIDE_ONLY, policy="sed", host=host, port=port)
    deploy._report(deploy._find(args), args)
    assert f"on http://{'[::1]' if host == '::1' else host}:{port}; " in capsys.readouterr().out


@pytest.mark.parametrize("port", [-1, 0, 99999])
def test_a_port_that_there_is_none_of_is_named_in_one_sentence(port):
    bound = "less than or equal to 65535" if port > 1 else "greater than or equal to 1"
    with pytest.raises(SystemExit, match=rf"^error: port: Input should be {bound}$"):
        deploy.main(deploy.Args(port=port))


@pytest.mark.parametrize("scenario", ["poisson_085", "stale_signals", "conversation_mixed_gpus"])
def test_the_command_that_is_printed_without_pools_works_as_it_stands(scenario):
    found = deploy._find(deploy.Args(cluster=deploy.DECIDE_ONLY, scenario=scenario))
    path, *_, body = shlex.split(found.example)
    assert path == "/v1/route"
    snapshots = RouteMessage.model_validate_json(body).snapshots
    assert {one.engine is not None for one in snapshots} == {scenario != "poisson_085"}


@pytest.fixture
def local_addresses(monkeypatch):
    """Nobody waits long for an address, and Ray takes this machine's own for what it is."""
    monkeypatch.setattr(deploy, "_REACH_S", 0.5)
    services = "ray._private.services.resolve_ip_for_localhost"
    monkeypatch.setattr(services, lambda host: host)


def test_a_ray_that_is_gone_is_named_in_one_sentence(local_addresses, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    sentence = refusal(deploy, "--cluster", deploy.DECIDE_ONLY)
    assert sentence == f"error: no Ray at {address} within 0.5 s: Deadline Exceeded"


def test_so_is_somebody_else_at_its_port_who_says_nothing(local_addresses, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{mute.getsockname()[1]}")
        assert "error: no Ray at 127.0.0.1:" in refusal(deploy, "--cluster", deploy.DECIDE_ONLY)


def test_an_address_that_is_none_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    sentence = refusal(deploy, "--cluster", deploy.DECIDE_ONLY)
    assert sentence == "error: Invalid address format: nonsense"


class SlowRay:
    """A Ray whose first starts time out, and leave a process behind."""

    def __init__(self, num_failures):
        self.num_failures, self.left = num_failures, []

    def init(self, **options):
        assert options["address"] == "local"
        assert not any(map(psutil.pid_exists, self.left))
        if self.num_failures == 0:
            return
        self.num_failures -= 1
        self.left.append(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600"))
        raise Exception("The current node timed out during startup. The GCS is overloaded.")


@pytest.mark.integration
def test_a_ray_that_does_not_start_in_time_is_tried_again_and_then_explained(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    slow = SlowRay(3)
    monkeypatch.setattr(ray, "init", slow.init)
    # There may be one that other tests share.
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    sentence = refusal(deploy, "--cluster", "emulated", "--port", free_port())
    assert sentence.startswith("error: no Ray: The current node timed out during startup.")
    assert "a cluster whose pools are all external needs no Ray" in sentence
    assert len(slow.left) == 3
    deploy._connect(None, 1.0)
    slow.num_failures = 1
    deploy._connect(None, 1.0)
    assert len(slow.left) == 4


def test_a_process_whose_event_loop_hangs_ends_with_an_error(monkeypatch, capsys):
    beats = iter([True, False, False, True, False, False, False])

    class Loop:
        def call_soon_threadsafe(self, answer):
            if next(beats):
                answer()

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(process, "_BEAT_EVERY_S", 0.0)
    monkeypatch.setattr(process, "_BEAT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(process.os, "_exit", leave)
    with pytest.raises(SystemExit, match="1"):
        process.watch(Loop())
    assert next(beats, None) is None
    assert "the event loop hangs" in capsys.readouterr().err
