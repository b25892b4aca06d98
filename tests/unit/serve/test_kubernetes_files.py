"""What `kubectl apply -k` applies of clusters/kubernetes: objects, commands, references."""

import shutil
import subprocess
from pathlib import Path
from typing import Literal

import kubernetes_validate
import pytest
import tyro
import yaml
from pydantic import BaseModel, ConfigDict, Field

from pipelines import deploy, epp
from serve_app.cluster import load_cluster
from serve_app.gateway.metrics import Metrics

FOLDER = Path(__file__).resolve().parents[3] / "clusters/kubernetes"
KUBERNETES_VERSION = "1.33"
COMMANDS = {"gateway": ("serve", deploy), "picker": ("epp", epp)}


def objects_in(folder):
    """Objects of a kustomization, by kind, before its generators and labels."""
    objects = {}
    for resource in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        path = (folder / resource).resolve()
        if path.is_dir():
            objects |= objects_in(path)
        else:
            for described in yaml.safe_load_all(path.read_text()):
                objects[described["kind"]] = described
    return objects


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Port(Strict):
    number: int = Field(ge=1, le=65535)


class PickerReference(Strict):
    name: str
    port: Port
    failureMode: Literal["FailOpen", "FailClose"]


class Selector(Strict):
    matchLabels: dict[str, str]


class InferencePoolSpec(Strict):
    """Of inference.networking.k8s.io/v1's InferencePool the fields that are set here."""

    selector: Selector
    targetPorts: list[Port] = Field(min_length=1, max_length=8)
    endpointPickerRef: PickerReference


@pytest.mark.parametrize("name", COMMANDS)
def test_objects_fit_kubernetes_schema(name):
    objects = objects_in(FOLDER / name)
    pool = objects.pop("InferencePool", None)
    for described in objects.values():
        kubernetes_validate.validate(described, KUBERNETES_VERSION, strict=True)
    assert {"Deployment", "Service", "ServiceAccount", "Role", "RoleBinding"} == objects.keys()
    if pool is not None:
        assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
        spec = InferencePoolSpec.model_validate(pool["spec"])
        reference = spec.endpointPickerRef
        assert reference.name == objects["Service"]["metadata"]["name"]
        assert reference.port.number in {p["port"] for p in objects["Service"]["spec"]["ports"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pod_runs_a_command_that_there_is_with_its_ports_and_its_file(name):
    objects = objects_in(FOLDER / name)
    pod = objects["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    verb, command = COMMANDS[name]
    assert container["command"][:2] == ["tokenyard", verb]
    args = tyro.cli(command.Args, args=[*container["command"][2:], *container["args"]])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    if verb == "serve":
        assert (args.host, ports) == ("0.0.0.0", {"http": args.port})
    else:
        assert (args.host, args.http_host) == ("0.0.0.0", "0.0.0.0")
        assert ports == {"grpc": args.port, "http": args.http_port}
        probes = (container["readinessProbe"], container["livenessProbe"])
        assert [probe["grpc"]["service"] for probe in probes] == ["readiness", "liveness"]
        assert {probe["grpc"]["port"] for probe in probes} == {args.port}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    targets = {port["targetPort"] for port in objects["Service"]["spec"]["ports"]}
    assert targets == set(ports)
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(args.cluster).parent) in mounted
    assert Path(args.cluster).name == "cluster.yaml"
    (account,) = objects["RoleBinding"]["subjects"]
    assert pod["spec"]["serviceAccountName"] == account["name"]
    cluster = load_cluster(str(FOLDER / name / "cluster.yaml"))
    named = cluster.external_pools[0].service_discovery.kubernetes
    pool = objects.get("InferencePool")
    assert (named.service, named.inference_pool) == (
        ("vllm", None) if pool is None else (None, pool["metadata"]["name"])
    )
    assert not cluster.needs_ray


@pytest.mark.parametrize("name", COMMANDS)
def test_kustomize_builds_it(name):
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    built = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / name)], check=True, capture_output=True, text=True
    ).stdout
    objects = {described["kind"]: described for described in yaml.safe_load_all(built)}
    template = objects["Deployment"]["spec"]["template"]["spec"]
    volume = next(v for v in template["volumes"] if v["name"] == "cluster")
    assert volume["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    assert [container["image"] for container in template["containers"]] == ["tokenyard:cpu"]


def test_autoscalers_ask_for_what_the_gateway_tells():
    pool = "vllm"
    scaler = yaml.safe_load((FOLDER / "autoscaling/hpa.yaml").read_text())
    kubernetes_validate.validate(scaler, KUBERNETES_VERSION, strict=True)
    metric = scaler["spec"]["metrics"][0]["external"]["metric"]
    metrics = Metrics()
    metrics.recommended_replicas.labels(pool).set(3)
    assert metrics.registry.get_sample_value(metric["name"], metric["selector"]["matchLabels"]) == 3
    keda = yaml.safe_load((FOLDER / "autoscaling/keda.yaml").read_text())
    models = pytest.importorskip("cloudcoil.models.keda.v1alpha1")
    assert models.ScaledObject.model_validate(keda)
    (trigger,) = keda["spec"]["triggers"]
    assert trigger["metadata"]["valueLocation"] == "pools.0.recommended_replicas"
    service = objects_in(FOLDER / "gateway")["Service"]["metadata"]["name"]
    assert trigger["metadata"]["url"] == f"http://{service}:8000/v1/pools"
