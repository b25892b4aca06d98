"""cluster.yaml on hosts of its own: a sweep and a service over two workers; each dies once.

Run by `make test-cluster`. The steps follow docs/cluster.md on a fresh clone, with the
three lines edited that cluster.yaml asks to edit. What differs from machines in a rack:
`hosts.Host.install` has put the wheels there, as no package index is in reach; numba's cache is
on a disk that all share, as they share two cores; the model is a random Llama.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.cluster_sweeps import SCENARIO
from cluster.hosts import CLEAN_ENVIRONMENT, REPOSITORY, Host, lan, why_not
from unit.engine_builders import a_tiny_llama
from unit.tiny_tokenizer import save_tiny_tokenizer

from tokenyard.rl.columnar.env_runner import ColumnarEnvRunner

pytestmark = pytest.mark.cluster

BUCKET = "s3://sweeps/runs"
DASHBOARD = "http://10.77.0.2:8265"
MLFLOW = "http://10.77.0.2:5000"
GATEWAY = "http://10.77.0.2:8000"
MODEL = f"tokenyard-routing-{SCENARIO}"
SWEEP = (
    f"env PYTHONPATH=tests/cluster python pipelines/sweep.py --storage {BUCKET} "
    "--env-runners 2 --placement SPREAD"
)


class Lab:
    """The hosts, and what has been measured on them."""

    def __init__(self, hosts: dict[str, Host]) -> None:
        self.hosts = hosts
        self.times_s: dict[str, float] = {}
        self.up_began_s = 0.0

    def laptop(self, command: str, timeout_s: float = 300, check: bool = True) -> str:
        """Run a command from the clone, as a person would; returns its output."""
        text = f"cd tokenyard && export RAY_AUTH_MODE=token && {command}"
        done = self.hosts["laptop"].sh(text, timeout_s, check)
        return done.stdout + done.stderr

    def on_laptop(self, script: str, timeout_s: float = 200) -> Any:
        """Run Python there; what it prints last is JSON."""
        token = "export MLFLOW_TRACKING_TOKEN=$(cat ~/.ray/auth_token)"
        text = f"cd tokenyard && {token} && python - <<'END'\n{script}\nEND"
        said = self.hosts["laptop"].sh(text, timeout_s).stdout
        return json.loads(said.strip().splitlines()[-1])

    def start_on_laptop(self, command: str) -> subprocess.Popen[str]:
        text = f"cd tokenyard && export RAY_AUTH_MODE=token && {command}"
        return subprocess.Popen(
            self.hosts["laptop"].command(text), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=CLEAN_ENVIRONMENT,
        )  # fmt: skip

    def state(self, what: str) -> list[dict[str, Any]]:
        """Nodes or actors, as Ray's state API lists them; asked again while it is too busy."""
        ask = (
            'curl -s -m 20 -H "Authorization: Bearer $(cat ~/.ray/auth_token)" '
            f"'{DASHBOARD}/api/v0/{what}'"
        )
        for _ in range(6):
            said = self.laptop(ask, check=False)
            try:
                return json.loads(said)["data"]["result"]["result"]
            except (json.JSONDecodeError, KeyError, TypeError):
                time.sleep(3)
        raise AssertionError(f"the state API does not answer {what}: {said!r}")

    def nodes(self) -> dict[str, str]:
        """Hosts that are in the cluster, by node id."""
        found = self.state("nodes?limit=100")
        return {one["node_id"]: one["labels"]["host"] for one in found if one["state"] == "ALIVE"}

    def actors(self, class_name: str) -> list[dict[str, Any]]:
        """Actors of a class, also the dead ones of a job that still runs."""
        by_class = "filter_keys=class_name&filter_predicates=%3D&filter_values="
        return self.state(f"actors?limit=1000&{by_class}{class_name}")

    def timed(self, name: str, since_s: float) -> float:
        self.times_s[name] = round(time.monotonic() - since_s, 1)
        print(f"\n{name}: {self.times_s[name]} s", flush=True)
        return self.times_s[name]


def wait_until(condition, timeout_s: float, what: str, every_s: float = 3.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)


@pytest.fixture(scope="module")
def lab(request):
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    # Not under /tmp, which every host has of its own.
    folder = REPOSITORY / ".cache" / f"hosts-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        with lan(["laptop", "head", "w1", "w2", "store"], folder) as hosts:
            lab = Lab(hosts)
            _install(hosts, folder)
            yield lab
            _report(lab)
            if request.session.testsfailed:
                _keep_logs(hosts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _install(hosts: dict[str, Host], folder: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/id_ed25519"], check=True
    )
    for host in hosts.values():
        host.environment = {
            # What the administrator of a MinIO would put there.
            "AWS_ENDPOINT_URL": f"http://{hosts['store'].address}:9000",
            "AWS_ACCESS_KEY_ID": "tokenyard",
            "AWS_SECRET_ACCESS_KEY": "tokenyard",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NUMBA_CACHE_DIR": "/root/shared/numba",
            # Ray's workers would wait for whatever else this machine does.
            "RAY_worker_niceness": "0",
        }
        host.install((folder / "id_ed25519.pub").read_text())
        host.start()
    laptop = folder / "laptop/root"
    for name in ("id_ed25519", "id_ed25519.pub"):
        shutil.copy(folder / name, laptop / ".ssh" / name)
    with (laptop / ".bashrc").open("a") as file:
        file.write("export PATH=$HOME/tokenyard/.venv/bin:$PATH\n")
    _clone(laptop / "tokenyard")
    _edit_three_lines(laptop / "tokenyard/cluster.yaml", hosts)
    a_tiny_llama(folder / "shared/llama", vocab_size=300, max_position_embeddings=2048)
    save_tiny_tokenizer(folder / "shared/llama")
    # `make install`, which README.md begins with.
    hosts["laptop"].sh("cd tokenyard && python -m pip install --quiet --editable .", 200)
    hosts["store"].run_service("tokenyard/.venv/bin/moto_server -H 0.0.0.0 -p 9000")


def _clone(there: Path) -> None:
    """Copy the tree as git sees it, with what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(
        ["rsync", "-a", "--ignore-missing-args", "--files-from=-", ".", f"{there}/"],
        cwd=REPOSITORY, check=True, input=listed.stdout,
    )  # fmt: skip


def _edit_three_lines(file: Path, hosts: dict[str, Host]) -> None:
    workers = f"{hosts['w1'].address}, {hosts['w2'].address}"
    edits = {
        "head_ip: .*": f"head_ip: {hosts['head'].address}",
        "worker_ips: .*": f"worker_ips: [{workers}]",
        "auth: .*": "auth: {ssh_user: root, ssh_private_key: ~/.ssh/id_ed25519}",
    }
    text = file.read_text()
    for pattern, line in edits.items():
        text, count = re.subn(rf"(?m)^(\s*){pattern}$", rf"\g<1>{line}", text)
        assert count == 1, pattern
    file.write_text(text)


def _report(lab: Lab) -> None:
    path = os.environ.get("TOKENYARD_CLUSTER_JSON")
    if path is not None:
        Path(path).write_text(json.dumps(lab.times_s, indent=1))


def _keep_logs(hosts: dict[str, Host]) -> None:
    kept = REPOSITORY / ".cache/cluster-logs"
    shutil.rmtree(kept, ignore_errors=True)
    for name, host in hosts.items():
        for session in (host.folder / "tmp/ray").glob("session_2*/logs"):
            shutil.copytree(
                session, kept / name / session.parent.name, ignore_dangling_symlinks=True,
                ignore=shutil.ignore_patterns("*.sock"),
            )  # fmt: skip
    print(f"\nlogs of the hosts: {kept}")


def test_ray_up_brings_every_host_into_the_cluster(lab):
    lab.laptop("ray get-auth-token --generate")
    lab.up_began_s = time.monotonic()
    said = lab.laptop("ray up -y cluster.yaml", timeout_s=600)
    assert "Job 'mlflow' submitted" in said
    lab.timed("ray_up_s", lab.up_began_s)
    wait_until(lambda: set(lab.nodes().values()) == {"head", "w1", "w2"}, 400, "three nodes joined")
    lab.timed("ray_up_to_three_nodes_s", lab.up_began_s)


def test_without_the_token_nobody_gets_in(lab):
    said = lab.laptop(
        f"mv ~/.ray/auth_token ~/token; ray job list --address {DASHBOARD} 2>&1; "
        "mv ~/token ~/.ray/auth_token",
        check=False,
    )
    assert "token" in said
    assert "Traceback" in said or "Authentication" in said


def make_bucket(lab):
    lab.laptop("""python -c 'import boto3; boto3.client("s3").create_bucket(Bucket="sweeps")'""")


def test_a_sweep_of_two_trials_runs_on_both_workers(lab):
    make_bucket(lab)
    hosts = lab.nodes()
    began_s = time.monotonic()
    job = lab.start_on_laptop(
        f"ray job submit --address {DASHBOARD} -- {SWEEP} cluster_sweeps:two_trials --name two"
    )
    sampled_on = set()

    def done():
        # Asked while it runs: Ray forgets a job's actors once the job is over.
        sampled_on.update(
            hosts.get(one["node_id"]) for one in lab.actors(ColumnarEnvRunner.__name__)
        )
        return job.poll() is not None

    try:
        wait_until(done, 900, "the end of the sweep")
        said, _ = job.communicate()
    finally:
        job.kill()
    lab.timed("two_trial_sweep_s", began_s)
    lab.timed("ray_up_to_finished_sweep_s", lab.up_began_s)
    assert f"registered as {MODEL} version 1" in said
    # An actor that is not yet placed has no host.
    assert sampled_on - {None} == {"w1", "w2"}


def test_the_sweep_is_in_mlflow_and_its_checkpoints_are_in_the_bucket_for_everybody(lab):
    found = lab.on_laptop(f"""
import json
from mlflow import MlflowClient
from pyarrow import fs
from tokenyard import registry
from tokenyard.routing.artifact import PolicyArtifact
client = MlflowClient("{MLFLOW}")
experiment = client.get_experiment_by_name("tokenyard-routing")
runs = client.search_runs([experiment.experiment_id])
swept = registry.mlflow_lookup("{MLFLOW}", "candidate")("{MODEL}")
store, path = fs.FileSystem.from_uri("{BUCKET}")
files = store.get_file_info(fs.FileSelector(path, recursive=True))
print(json.dumps({{
    "runs": [[run.info.status, "tokenyard.trial_id" in run.data.tags] for run in runs],
    "trainer": PolicyArtifact.load(swept.path).metadata.trainer,
    "checkpoints": sum(info.base_name == "artifact.npz" for info in files),
}}))""")
    assert sorted(found["runs"]) == [["FINISHED", False], ["FINISHED", True], ["FINISHED", True]]
    assert found["trainer"] == "ppo"
    assert found["checkpoints"] >= 2


def finished_trials(lab, name):
    """Trials of a sweep that are done, by their runs in MLflow."""
    body = json.dumps({"experiment_ids": ["1"], "filter": f"tags.sweep = '{name}'"})
    said = lab.laptop(
        f"curl -s -m 20 --retry 5 {MLFLOW}/api/2.0/mlflow/runs/search "
        '-H "authorization: Bearer $(cat ~/.ray/auth_token)" '
        f"-H 'content-type: application/json' -d {shlex.quote(body)}"
    )
    return {
        tag["value"]
        for run in json.loads(said).get("runs", [])
        for tag in run["data"]["tags"]
        if tag["key"] == "tokenyard.trial_id" and run["info"]["status"] == "FINISHED"
    }


def test_a_worker_that_dies_in_mid_sweep_costs_no_finished_trial(lab):
    began_s = time.monotonic()
    job = lab.start_on_laptop(
        f"ray job submit --address {DASHBOARD} -- {SWEEP} cluster_sweeps:four_trials --name four "
        "--max-failures -1 --json runs/four.json"
    )
    try:
        wait_until(
            lambda: len(finished_trials(lab, "four")) >= 2 or job.poll() is not None, 900,
            "two finished trials",
        )  # fmt: skip
        before = finished_trials(lab, "four")
        lab.hosts["w2"].kill()
        killed_s = time.monotonic()
        wait_until(lambda: "w2" not in lab.nodes().values(), 240, "w2 is counted as dead")
        lab.timed("worker_death_noticed_s", killed_s)
        # Back from the repair shop: the autoscaler is to find it, and start Ray on it.
        lab.hosts["w2"].start()
        said, _ = job.communicate(timeout=900)
    finally:
        job.kill()
    assert job.returncode == 0, said[-4000:]
    lab.timed("four_trial_sweep_with_a_dead_worker_s", began_s)
    result = json.loads(lab.hosts["head"].sh("cat tokenyard/runs/four.json").stdout)
    assert len(result["rows"]) == 4
    assert all(row["env_steps"] >= 20_000 for row in result["rows"])
    assert len(before) >= 2
    assert before <= finished_trials(lab, "four")
    wait_until(lambda: "w2" in lab.nodes().values(), 400, "w2 is back")
    lab.timed("worker_back_s", killed_s)


def ask(lab, timeout_s=20):
    body = json.dumps({"model": "tiny", "prompt": "one two three", "max_tokens": 8})
    said = lab.laptop(
        f"curl -s -m {timeout_s} -w '%{{http_code}}' -o /dev/null {GATEWAY}/v1/completions "
        f"-H 'content-type: application/json' -d '{body}'",
        check=False,
    )
    return said.strip().endswith("200")


def pools(lab):
    """Replicas the gateway knows and has heard of lately, by pool."""
    said = lab.laptop(f"curl -s -m 10 {GATEWAY}/v1/pools", check=False)
    try:
        return [one["pool"] for one in json.loads(said)["replicas"]]
    except (json.JSONDecodeError, KeyError):
        return []


def deploy(lab):
    """Deploy clusters/serve.yaml, its pools with the tiny model, by what was swept last."""
    cluster = yaml.safe_load((REPOSITORY / "clusters/two_hosts.yaml").read_text())
    cluster["served_model"] = "tiny"
    for pool in cluster["pools"]:
        pool["config"] |= {"model": "/root/shared/llama", "rank_cpus": 0.2, "kv_bytes": 1 << 24}
    shared = lab.hosts["laptop"].folder.parent / "shared"
    (shared / "pools.yaml").write_text(yaml.safe_dump(cluster))
    file = lab.hosts["laptop"].folder / "root/tokenyard/clusters/serve.yaml"
    text = file.read_text()
    assert "cluster: clusters/two_hosts.yaml" in text
    file.write_text(
        text.replace(
            "cluster: clusters/two_hosts.yaml",
            "cluster: /root/shared/pools.yaml, policy: candidate",
        )
    )
    lab.laptop(f"serve deploy -a {DASHBOARD} clusters/serve.yaml")


def test_the_service_spans_two_hosts_with_each_pool_where_it_belongs(lab):
    began_s = time.monotonic()
    deploy(lab)
    wait_until(lambda: sorted(pools(lab)) == ["first", "second"], 600, "a replica in each pool")
    lab.timed("serve_deploy_s", began_s)
    assert ask(lab)
    hosts = lab.nodes()
    alive = [one for one in lab.actors("Rank") if one["state"] == "ALIVE"]
    assert sorted(hosts[one["node_id"]] for one in alive) == ["w1", "w2"]


def test_the_policy_that_was_swept_on_the_cluster_answers_on_it(lab):
    swept = lab.on_laptop(f"""
import json
from tokenyard import registry
from tokenyard.routing.artifact import PolicyArtifact
found = registry.mlflow_lookup("{MLFLOW}", "candidate")("{MODEL}")
sha256 = PolicyArtifact.load(found.path).sha256
print(json.dumps({{"sha256": sha256, "mlflow_run": found.run_id}}))""")
    assert ask(lab)
    policy = json.loads(lab.laptop(f"curl -s -m 20 {GATEWAY}/v1/policy"))
    assert {key: policy[key] for key in swept} == swept
    assert policy["source"] == f"registry {MODEL}@candidate"
    assert policy["num_decisions"] > policy["num_fallbacks"]


def replay(lab, duration_s, file, rate=2):
    return lab.start_on_laptop(
        f"python pipelines/replay.py --url {GATEWAY} --rate {rate} --length-scale 0.02 "
        f"--duration-s {duration_s} --json ~/{file}"
    )


def row_of(lab, process, file, timeout_s):
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, said[-4000:]
    (row,) = json.loads(lab.hosts["laptop"].sh(f"cat ~/{file}").stdout)["rows"]
    return row


def test_a_worker_that_dies_in_mid_replay_leaves_a_service_that_recovers(lab):
    process = replay(lab, 60, "during.json")
    time.sleep(20)
    lab.hosts["w1"].kill()
    killed_s = time.monotonic()
    # Ten in a row: by chance alone some go to the pool that is still there.
    good = 0
    while good < 10:
        assert time.monotonic() - killed_s < 240, "the service does not recover"
        good = good + 1 if ask(lab, timeout_s=5) else 0
    lab.timed("service_recovered_s", killed_s)
    # Requests at the lost host end long before the deadlines of own pools, which are 600 s.
    during = row_of(lab, process, "during.json", 120)
    print(f"\nreplay with a death: {during['completed']} of {during['requests']} completed")
    assert during["completed"] + during["failed"] == during["requests"]
    assert during["completed"] >= 0.8 * during["requests"]
    after = row_of(lab, replay(lab, 15, "after.json"), "after.json", 300)
    assert after["failed"] == 0
    lab.hosts["w1"].start()
    wait_until(lambda: sorted(pools(lab)) == ["first", "second"], 600, "the lost pool is back")
    lab.timed("lost_pool_back_s", killed_s)


def test_from_ray_up_to_a_finished_sweep_it_takes_less_than_six_minutes(lab):
    assert lab.times_s["ray_up_to_finished_sweep_s"] < 360


def test_ray_down_leaves_no_process(lab):
    began_s = time.monotonic()
    lab.laptop("ray down -y cluster.yaml", timeout_s=400)
    lab.timed("ray_down_s", began_s)

    def left():
        return [line for n in ("head", "w1", "w2") for line in lab.hosts[n].processes()]

    wait_until(lambda: not left(), 200, "nothing runs any more")
    lab.timed("nothing_left_s", began_s)
