"""Files for clusters, against the schemas of the tools that read them, without any cloud."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from serve_app.app import GatewayOptions
from serve_app.cluster import Cluster, load_cluster
from serve_app.ray_serve.replica import bind_pool

REPOSITORY = Path(__file__).parents[3]
LAUNCHER_FILES = ("cluster.yaml", "clusters/aws.yaml", "clusters/gcp.yaml")
RAY_VERSION = re.search(r'"ray\[.*\]==([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())[1]
KUBERAY_VERSION = "1.6.2"
KUBERNETES_VERSION = "1.33"


def read(name):
    return yaml.safe_load((REPOSITORY / name).read_text())


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_a_launcher_file_fits_rays_schema(name):
    if name == "clusters/aws.yaml":
        pytest.skip("Ray asks AWS for the size of machines first: see the test with moto below")
    validate_config(prepare_config(read(name)))


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_a_key_that_ray_does_not_know_is_refused(name):
    config = read(name)
    config["auth"] = {**config["auth"], "ssh_port": 2222}
    with pytest.raises(Exception, match="ssh_port"):
        validate_config(prepare_config(config))


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_nodes_install_the_project_and_share_the_token(name):
    config = read(name)
    assert config["file_mounts"]["~/tokenyard"] == "."
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    commands = "\n".join(config["setup_commands"])
    assert "pip install" in commands
    assert "RAY_AUTH_MODE=token" in commands
    start = "\n".join(config["head_start_ray_commands"])
    assert "--num-cpus=0" in start
    assert "mlflow server --app-name=tokenyard" in " ".join(start.split())
    assert "MLFLOW_TRACKING_TOKEN=$(cat ~/.ray/auth_token)" in commands


def test_exactly_three_lines_of_cluster_yaml_are_to_be_edited():
    text = (REPOSITORY / "cluster.yaml").read_text()
    marked = [line for line in text.splitlines() if re.search(r"# \(\d\)", line)]
    assert [line.strip().split(":")[0] for line in marked] == ["head_ip", "worker_ips", "auth"]


@pytest.mark.parametrize("name", ["clusters/aws.yaml", "clusters/gcp.yaml"])
def test_the_head_of_a_cloud_cluster_is_not_on_spot_and_some_workers_are(name):
    config = read(name)
    types = config["available_node_types"]

    def on_spot(node_type):
        machine = types[node_type]["node_config"]
        scheduling = machine.get("scheduling", [{}])[0]
        return "InstanceMarketOptions" in machine or scheduling.get("preemptible", False)

    assert not on_spot(config["head_node_type"])
    assert on_spot("trials")
    pools = {one["labels"].get("pool") for one in types.values()} - {None}
    assert len(pools) >= 2


@pytest.mark.slow
def test_ray_makes_what_is_missing_on_aws_and_starts_every_type_of_node(monkeypatch, tmp_path):
    moto = pytest.importorskip("moto")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "moto")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    # moto knows few images.
    monkeypatch.setenv("MOTO_ENABLE_AMI_VALIDATION", "false")
    with moto.mock_aws():
        import boto3
        from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

        config = prepare_config(read("clusters/aws.yaml"))
        config = AWSNodeProvider.fillout_available_node_types_resources(config)
        validate_config(config)
        # Ray waits until what it made is there everywhere, which here it is.
        monkeypatch.setattr("ray.autoscaler._private.aws.config.time.sleep", lambda _: None)
        config = AWSNodeProvider.bootstrap_config(config)
        resources = {name: one["resources"] for name, one in config["available_node_types"].items()}
        assert resources["head"]["CPU"] == 0
        assert resources["trials"]["CPU"] == 16
        assert resources["a10g"]["accelerator_type:A10G"] == 1
        assert resources["h100"]["GPU"] == 8
        provider = AWSNodeProvider(config["provider"], config["cluster_name"])
        for name, node_type in config["available_node_types"].items():
            tags = {
                "ray-node-kind": "head" if name == "head" else "worker",
                "ray-user-node-type": name,
                "ray-launch-config": "x",
                "ray-node-name": f"tokenyard-{name}",
                "ray-node-status": "uninitialized",
            }
            provider.create_node(node_type["node_config"], tags, 1)
        ec2 = boto3.client("ec2", region_name=config["provider"]["region"])
        instances = [
            instance
            for reservation in ec2.describe_instances()["Reservations"]
            for instance in reservation["Instances"]
        ]
        started = {
            next(t["Value"] for t in one["Tags"] if t["Key"] == "ray-user-node-type"): one
            for one in instances
        }
        assert {name: one["InstanceType"] for name, one in started.items()} == {
            name: one["node_config"]["InstanceType"]
            for name, one in config["available_node_types"].items()
        }
        spot = {name for name, one in started.items() if one.get("InstanceLifecycle") == "spot"}
        assert spot == {"trials", "l4"}
        assert len(ec2.describe_key_pairs()["KeyPairs"]) == 1


def kubernetes_objects():
    return list(yaml.safe_load_all((REPOSITORY / "clusters/kuberay.yaml").read_text()))


def objects_of(kind):
    return [one for one in kubernetes_objects() if one["kind"] == kind]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Quantity = Annotated[int, Field(ge=0)]


class AuthOptions(Strict):
    mode: Literal["token", "disabled"]


class AutoscalerOptions(Strict):
    upscalingMode: Literal["Default", "Aggressive", "Conservative"]
    idleTimeoutSeconds: Quantity


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: Quantity
    minReplicas: Quantity
    maxReplicas: Quantity


class RayClusterSpec(Strict):
    """Of ray.io/v1's RayCluster the fields that we set, read from KubeRay's API reference."""

    rayVersion: str
    authOptions: AuthOptions
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: RayClusterSpec


def ray_clusters():
    specs = [one["spec"] for one in objects_of("RayCluster")]
    specs += [one["spec"]["rayClusterConfig"] for one in objects_of("RayService")]
    return [RayClusterSpec.model_validate(spec) for spec in specs]


def test_kuberays_objects_have_the_fields_that_its_reference_names():
    (service,) = objects_of("RayService")
    RayServiceSpec.model_validate(service["spec"])
    assert len(ray_clusters()) == 2
    for cluster in ray_clusters():
        # The version of the image's Ray; KubeRay refuses token authentication without it.
        assert cluster.rayVersion == RAY_VERSION
        assert cluster.authOptions.mode == "token"
        assert cluster.headGroupSpec.rayStartParams["num-cpus"] == "0"
        for group in cluster.workerGroupSpecs:
            assert group.minReplicas <= group.replicas <= group.maxReplicas


def test_pods_and_what_else_is_kubernetes_own_fit_its_schema():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    own = [one for one in kubernetes_objects() if one["apiVersion"] in ("v1", "apps/v1")]
    assert {one["kind"] for one in own} >= {"ConfigMap", "Deployment", "Service"}
    for cluster in ray_clusters():
        for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
            own.append({**pod, **group.template})
    for one in own:
        kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)


def test_prometheus_scrapes_by_ports_and_labels_that_are_there():
    models = pytest.importorskip("cloudcoil.models.prometheus_operator.v1")
    (pods,) = objects_of("PodMonitor")
    (service,) = objects_of("ServiceMonitor")
    for model, one in ((models.PodMonitor, pods), (models.ServiceMonitor, service)):
        assert model.model_validate(one).model_dump(exclude_unset=True, by_alias=True)
    (endpoint,) = pods["spec"]["podMetricsEndpoints"]
    for cluster in ray_clusters():
        for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
            (container,) = group.template["spec"]["containers"]
            assert endpoint["port"] in {port["name"] for port in container["ports"]}


def test_kuberays_objects_fit_its_custom_resource_definitions():
    jsonschema = pytest.importorskip("jsonschema")
    folder = Path(os.environ.get("KUBERAY_CRDS", REPOSITORY / f".cache/kuberay-{KUBERAY_VERSION}"))
    for kind in ("RayCluster", "RayService"):
        file = folder / f"ray.io_{kind.lower()}s.yaml"
        if not file.exists():
            pytest.skip(
                f"{file} is not there: take it from helm-chart/kuberay-operator/crds of KubeRay "
                f"{KUBERAY_VERSION}, or set KUBERAY_CRDS to a folder that has it"
            )
        versions = yaml.safe_load(file.read_text())["spec"]["versions"]
        schema = next(one for one in versions if one["name"] == "v1")["schema"]["openAPIV3Schema"]
        for one in objects_of(kind):
            jsonschema.validate(one, _closed(schema))


def _closed(schema):
    """An OpenAPI schema that refuses unknown fields, as the API server does for strict clients."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    if schema.get("x-kubernetes-embedded-resource") or schema.get("description", "").startswith(
        "Standard object"
    ):
        closed.pop("additionalProperties", None)
    return closed


def test_serve_files_name_an_application_and_pools_that_can_be_read():
    (service,) = objects_of("RayService")
    for config in (read("clusters/serve.yaml"), yaml.safe_load(service["spec"]["serveConfigV2"])):
        (application,) = ServeDeploySchema.model_validate(config).applications
        assert application.import_path == "serve_app.app:build_gateway"
        options = GatewayOptions.model_validate(application.args)
        assert (config["proxy_location"], options.port) == ("Disabled", 8000)
    (pools,) = objects_of("ConfigMap")
    cluster = Cluster.model_validate(yaml.safe_load(pools["data"]["pools.yaml"]))
    groups = {group.groupName for one in ray_clusters() for group in one.workerGroupSpecs}
    assert {pool.node_labels["pool"] for pool in cluster.own_pools} <= groups
    two_hosts = load_cluster(str(REPOSITORY / "clusters/two_hosts.yaml"))
    assert [pool.node_labels for pool in two_hosts.own_pools] == [{"host": "w1"}, {"host": "w2"}]


def test_a_pool_and_all_its_ranks_are_bound_to_the_nodes_that_it_names():
    two_hosts = load_cluster(str(REPOSITORY / "clusters/two_hosts.yaml"))
    pool = two_hosts.own_pools[1]
    config = pool.config.model_copy(update={"device": "cpu", "pipeline_parallel": 2})
    for labels in ({"host": "w2"}, {}):
        changed = pool.model_copy(update={"config": config, "node_labels": labels})
        replica = bind_pool(changed, two_hosts)._bound_deployment._replica_config
        assert len(replica.placement_group_bundles) == 3
        expected = [labels] * 3 if labels else None
        assert replica.placement_group_bundle_label_selector == expected


def test_the_image_copies_files_that_exist_and_installs_the_pinned_torch():
    text = (REPOSITORY / "docker/Dockerfile").read_text()
    stages = re.findall(r"(?m)^FROM (\S+) AS (\S+)$", text)
    assert [stage for _, stage in stages] == ["base", "cpu", "cuda", "final"]
    assert dict((stage, base) for base, stage in stages)["final"] == "${BASE}"
    for line in re.findall(r"(?m)^COPY (?:--\S+ )?(.+) \S+$", text):
        assert all((REPOSITORY / name).exists() for name in line.split())
    (torch,) = set(re.findall(r"torch==[\d.]+", text))
    assert f'"{torch}"' in (REPOSITORY / "pyproject.toml").read_text()


def test_mlflow_is_reached_by_rays_pods_alone_on_kubernetes():
    objects = list(yaml.safe_load_all((REPOSITORY / "clusters/kuberay.yaml").read_text()))
    (policy,) = [one for one in objects if one["kind"] == "NetworkPolicy"]
    (server,) = [
        one for one in objects if (one["kind"], one["metadata"]["name"]) == ("Deployment", "mlflow")
    ]
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["spec"]["ingress"]
    (source,) = rule["from"]
    assert source == {"podSelector": {"matchLabels": {"ray.io/is-ray-node": "yes"}}}
