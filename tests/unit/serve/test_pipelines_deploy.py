"""What deploy.py does before and after Ray: checks of its address, and the line that it prints."""

import shlex
import socket

import pytest

from pipelines import deploy
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
