"""The image's own command, and what `docker compose` starts beside it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tyro
import yaml

from pipelines import deploy
from serve_app.cluster import load_cluster

DOCKER = Path(__file__).resolve().parents[3] / "docker"


def served_by(command):
    """Options of a command `tokenyard serve`, as a shell with no variables gives them."""
    assert command[:2] == ["tokenyard", "serve"]
    plain = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in command[2:]]
    return tyro.cli(deploy.Args, args=plain)


def test_the_image_serves_and_says_whether_it_is_well():
    text = (DOCKER / "Dockerfile").read_text()
    args = served_by(yaml.safe_load(re.findall(r"(?m)^CMD (.+)$", text)[-1]))
    assert args.host == "0.0.0.0"
    (check,) = re.findall(r"(?m)^HEALTHCHECK .*CMD (.+)$", text)
    assert f":{args.port}/health" in check
    assert text.index("USER ray") < text.index("CMD [")


def test_compose_starts_the_gateway_with_files_that_there_are():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    args = served_by(services["gateway"]["command"])
    assert load_cluster(args.cluster).name == "emulated"
    for service in services.values():
        for volume in service["volumes"]:
            assert (DOCKER / volume.partition(":")[0]).exists(), volume
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": [f"gateway:{args.port}"]}]


def test_prometheus_takes_its_configuration(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    shutil.copy(DOCKER / "prometheus.yml", tmp_path)
    shutil.copy(DOCKER.parent / "clusters/monitoring/alerts.yaml", tmp_path)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    subprocess.run(command, check=True, capture_output=True)
