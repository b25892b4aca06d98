"""What a change of structure must not change: rows, decisions and the HTTP schema.

python tests/golden/record.py --check [PART ...]
python tests/golden/record.py --write

Rows come from the command `pipelines/evaluate.py` on shortened copies of every shipped scenario,
decisions from every shipped policy on drawn states, the schema from both HTTP applications.
`--check` prints what differs from `expected_*.json` beside this file and exits with 1. An intended
difference is recorded with `--write`, and the commit that does says why. Not compared: wall times
(`decision_ms`), and the head of a result file (command, versions, seed, git_sha).
"""

from __future__ import annotations

import functools
import gc
import hashlib
import io
import json
import math
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from serve_app import app as serving
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.policies import BEST_RULE, make_allocation_policy
from tokenyard.allocation.policies.rules import AllocationContext
from tokenyard.allocation.scenario import allocation_names
from tokenyard.allocation.types import AllocationState, SlotMeasurements
from tokenyard.regions.scenario import load_regions, region_names
from tokenyard.routing.artifact import DEFAULT_RULE, PolicyArtifact, learned_policy
from tokenyard.routing.scenario import load_scenario, scenario_names
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request, ScoringPolicy
from tokenyard.workload.paths import data_folders

HERE = Path(__file__).parent
PIPELINES = HERE.parents[1] / "pipelines"
TOLERANCE = 1e-9
DIGITS = 12
SEED = 17
NOT_COMPARED = {"decision_ms"}
SERVERS, FLEET = "sed,sed_reserve,sed_dump,sita", "sed,tuned_marginal_delay,dynamo_cost,sita"
ALLOCATION = "planner,best_static,autoscaler_tuned,autoscaler_forecast"
REGIONS = "skylb,prox_ot_forecast_live_cost,receding_horizon_live"
RECORDED = {
    "azure_code": "AzureLLMInferenceTrace_code.csv",
    "azure_conv": "AzureLLMInferenceTrace_conv_first60.csv",
    "vm_cpu": "azure_vm_cpu.csv",
}
"""The files that recorded parts were taken from."""
LAST_500 = {"azure_code": 8319, "azure_conv": 11119}
"""Where the last 500 requests of a recorded trace begin."""


@dataclass(frozen=True)
class Entry:
    """One scenario to be evaluated."""

    scenario: dict[str, Any]
    policies: str | None
    """None: all that are compared by default."""
    arguments: tuple[str, ...] = ()
    file: str | None = None
    """Of recorded traffic."""


@functools.cache
def entries() -> dict[str, Entry]:
    """What is evaluated, by name."""
    found: dict[str, Entry] = {}
    for name in scenario_names():
        found |= routing_entries(name)
    for name in allocation_names():
        found |= allocation_entries(name)
    for name in region_names():
        scenario = document(load_regions(name), "regions") | {"num_slots": 60}
        policies = None if name == "continents" else REGIONS
        found[f"regions/{name}"] = Entry(scenario, policies, ("--streams", "2"))
    return found


def routing_entries(name: str) -> dict[str, Entry]:
    """The scenario's synthetic and recorded traffic, and for some scenarios all rules."""
    scenario = document(load_scenario(name)) | {"requests_per_stream": 300}
    rules = f"champion,{DEFAULT_RULE},{FLEET if 'fleet' in scenario else SERVERS}"
    synthetic = ("--source", "synthetic", "--streams", "2")
    found = {f"routing/{name}": Entry(scenario, rules, synthetic)}
    if name in ("poisson_085", "multi_turn_prefix", "churn"):
        found[f"routing/{name}/all"] = Entry(scenario, None, synthetic)
    held_out = scenario.get("held_out_trace")
    if held_out:
        part = scenario | {"held_out_trace": held_out | {"first": LAST_500[held_out["name"]]}}
        file = RECORDED[held_out["name"]]
        recorded = ("--source", "held-out")
        found[f"routing/{name}/recorded"] = Entry(
            part, f"champion,{DEFAULT_RULE},sed", recorded, file
        )
    return found


def allocation_entries(name: str) -> dict[str, Entry]:
    """The scenario's generated and recorded demand, and once all policies with the bounds."""
    scenario = document(load_allocation(name), "allocation")
    demand = scenario.get("demand", {})
    generated = scenario | {"demand": demand | {"source": "generator"}}
    one = ("--streams", "1")
    if name not in tuned_pools():
        arguments = (*one, "--baseline", "planner")
        return {f"allocation/{name}": Entry(generated, "planner,autoscaler_70", arguments)}
    recorded = scenario | {"demand": demand | {"source": "vm_cpu"}}
    return {
        f"allocation/{name}": Entry(generated, None if name == "l4x4_7b" else ALLOCATION, one),
        f"allocation/{name}/recorded": Entry(
            recorded, "planner,autoscaler_tuned", one, RECORDED["vm_cpu"]
        ),
    }


def tuned_pools() -> list[str]:
    """Allocation scenarios whose rules were tuned."""
    folder = resources.files("tokenyard") / "scenarios" / "tuned" / "allocation"
    return sorted(Path(str(one)).stem for one in folder.iterdir())


def document(scenario: Any, problem: str | None = None) -> dict[str, Any]:
    """A scenario as its file says it."""
    told: dict[str, Any] = scenario.model_dump(mode="json", exclude_unset=True)
    return told | {"problem": problem} if problem else told


def evaluate(entry: Entry) -> dict[str, Any]:
    """Run the command; rows in their order, and the hashes of the policies it says it used."""
    with tempfile.TemporaryDirectory() as folder:
        scenario, result = Path(folder) / "scenario.yaml", Path(folder) / "rows.json"
        scenario.write_text(yaml.safe_dump(entry.scenario), encoding="utf-8")
        command = [str(PIPELINES / "evaluate.py"), "--scenario", str(scenario), *entry.arguments]
        command += ["--seed", str(SEED), "--json", str(result)]
        command += ["--policies", entry.policies] if entry.policies else []
        printed = run_script(command)
        rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    rows = [{k: v for k, v in row.items() if k not in NOT_COMPARED} for row in rows]
    columns = list(rows[0])
    assert all(list(row) == columns for row in rows), "rows of one scenario have other keys"
    hashes = dict(re.findall(r"^(\w+): .*\b([0-9a-f]{12})$", printed, re.MULTILINE))
    return {"artifacts": hashes, "columns": columns, "rows": [list(row.values()) for row in rows]}


def run_script(command: list[str]) -> str:
    """Run a script in this process, which has loaded the kernels; what it printed."""
    before = sys.argv, list(sys.path), os.environ.pop("MLFLOW_TRACKING_URI", None)
    sys.argv, sys.path = command, [str(PIPELINES), *sys.path]
    out, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        raise RuntimeError(f"{' '.join(command)}: {errors.getvalue()}") from stop
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before[2]
    return out.getvalue()


def missing(entry: Entry) -> str | None:
    """Why an entry cannot be evaluated here; None: it can."""
    if entry.file and recorded_sha256(entry.file) is None:
        return f"{entry.file} was not found (TOKENYARD_DATA)"
    topology = str(entry.scenario.get("topology", "synthetic/"))
    if not topology.startswith("synthetic/"):
        try:
            import topohub  # noqa: F401
        except ImportError:
            return "topohub is not installed"
    return None


def say(line: str) -> None:
    """To whoever reads along; not a difference."""
    sys.stderr.write(line + "\n")


def recorded_sha256(file: str) -> str | None:
    """Of the first folder's file, as the package looks for it."""
    for folder in data_folders():
        if (folder / file).is_file():
            return hashlib.sha256((folder / file).read_bytes()).hexdigest()[:12]
    return None


def rows_part(names: Iterable[str] | None = None) -> dict[str, Any]:
    """Rows of all entries that can be evaluated here, or of those that are named."""
    found: dict[str, Any] = {}
    known = entries()
    for name in names or known:
        reason = missing(known[name])
        if reason:
            say(f"skipped {name}: {reason}")
            continue
        found[name] = evaluate(known[name])
        if known[name].file:
            found[name]["file_sha256"] = recorded_sha256(str(known[name].file))
    return found


SERIAL = ("bursty_serial", "conversation", "high_load", "nominal", "poisson_085")
"""Routing policies that are offered servers; the others replicas that batch."""
NUM_CASES, NUM_SLOTS = 60, 120


def decisions_part() -> dict[str, Any]:
    """What every shipped policy of routing decides, and the rule that allocates."""
    found: dict[str, Any] = {}
    folder = resources.files("tokenyard") / "artifacts" / "routing"
    for path in sorted((Path(str(one)) for one in folder.iterdir()), key=lambda path: path.stem):
        serial = path.stem in SERIAL
        key = f"routing/{path.stem}" + ("" if serial else "/batching")
        found[key] = routing_decisions(PolicyArtifact.load(path), not serial)
    for name in tuned_pools():
        found[f"allocation/{name}"] = allocation_decisions(name)
    return found


def routing_decisions(artifact: PolicyArtifact, batches: bool) -> dict[str, Any]:
    """Chosen replicas, and the mean cost of each."""
    rng = np.random.default_rng(SEED)
    policy = learned_policy(artifact)
    num = artifact.metadata.num_replicas or 4
    chosen, scores = "", []
    for number in range(NUM_CASES):
        tokens = int(rng.integers(1, 6000))
        request = Request(2.0 * number, tokens, tokens + float(rng.integers(5, 600)))
        snapshots = [a_snapshot(i, request, rng, batches) for i in range(num)]
        if isinstance(policy, ScoringPolicy):
            decision = policy.decide(request, snapshots)
            chosen += str(decision.replica)
            scores.append(decision.scores)
        else:
            chosen += str(policy.route(request, snapshots))
    means = np.mean(scores, axis=0).tolist() if scores else None
    return {"sha256": artifact.sha256, "replicas": chosen, "mean_scores": means}


def a_snapshot(
    index: int, request: Request, rng: np.random.Generator, batches: bool
) -> ReplicaSnapshot:
    """A replica with a random backlog."""
    waiting, running = int(rng.integers(0, 4)), int(rng.integers(0, 16 if batches else 2))
    tokens = (waiting + running) * float(rng.uniform(500, 2500))
    prefill, output = float(rng.uniform(0, tokens)), 60.0 * (waiting + running)
    speed = float(rng.choice([0.5, 1.0, 2.0]))
    engine = EngineSnapshot(
        0.012 / speed, 1e-4 / speed, 3e-4 / speed, 4e-7 / speed, 512, 60_000.0,
        float(rng.random()), prefill, output, int(rng.integers(0, request.context_tokens)),
    )  # fmt: skip
    return ReplicaSnapshot(
        f"replica-{index}", 5000 * speed, 16 if batches else 1, 256 if batches else 5, waiting,
        running, tokens, mean_response_s=float(rng.uniform(0.1, 4)),
        observed_at_s=request.arrival_s, engine=engine if batches else None,
    )  # fmt: skip


def allocation_decisions(name: str) -> dict[str, Any]:
    """Plans, each from the one before under a noisy day of demand."""
    rng = np.random.default_rng(SEED)
    scenario = load_allocation(name)
    demand = scenario.demand.model_copy(update={"source": "generator"})
    context = AllocationContext(scenario.model_copy(update={"demand": demand}), rng)
    policy, table = make_allocation_policy(BEST_RULE, context), context.table
    slots = np.arange(600 + NUM_SLOTS)
    per_s = table.pool_goodput_capacity_per_s * (0.4 - 0.35 * np.cos(2 * np.pi * slots / 144))
    per_s = (per_s * np.exp(rng.normal(0, 0.1, len(slots)))).tolist()
    plan, plans = table.plans[0], []
    for slot in range(600, 600 + NUM_SLOTS):
        measured = SlotMeasurements(*rng.uniform(0, [1.0, 1.0, 20.0, 0.3, 90.0, 0.3]).tolist())
        state = AllocationState(
            slot * scenario.slot_s, plan, tuple(per_s[slot - 600 : slot]),
            float(rng.choice([0, 50])), int(rng.integers(1, 20)), measured=measured,
        )  # fmt: skip
        plan = policy.allocate(state)
        plans.append(
            f"{plan.parallelism} {plan.num_gpus} {plan.memory_fraction:g} {plan.max_batch}"
        )
    kinds = sorted(set(plans))
    return {"plans": kinds, "decided": " ".join(str(kinds.index(one)) for one in plans)}


def schema_part() -> dict[str, Any]:
    """Both HTTP schemas: a hash, and what a reader needs to see where one differs."""
    # An allocated pool is made while it serves; those that stay would need Ray before.
    clusters = {"gateway": "local_cpu", "decide": "none"}
    return {name: described(schema_of(cluster)) for name, cluster in clusters.items()}


def schema_of(cluster: str) -> dict[str, Any]:
    """The schema of the application that serves a cluster."""
    options = serving.GatewayOptions(cluster=cluster)
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        allocated = serving.find_cluster(options).model_copy(update={"pools": ()})
        # It answers the same routes as a lone gateway, and takes no port.
        gateway = serving.DeciderReplica(allocated, options, {})
    finally:
        # What the gateway sets for its process would stay in that of the tests.
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
    return gateway.make_api().openapi()


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """Hash, operations with their parameters and schemas, and the fields of every schema."""
    text = json.dumps(schema, sort_keys=True)
    operations = {
        f"{method} {path}": " ".join(
            [one["name"] for one in operation.get("parameters", [])]
            + sorted(set(re.findall(r"#/components/schemas/(\w+)", json.dumps(operation))))
        )
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    }
    schemas = schema.get("components", {}).get("schemas", {})
    fields = {
        name: " ".join(sorted(one.get("properties", one.get("enum", [])))) + " | required: "
        + " ".join(sorted(one.get("required", [])))
        for name, one in schemas.items()
    }  # fmt: skip
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return {"sha256": sha256, "operations": operations, "schemas": fields}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "decisions": decisions_part,
    "schema": schema_part,
    "rows": rows_part,
}


def expected(part: str) -> dict[str, Any]:
    """What was recorded."""
    text = (HERE / f"expected_{part}.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def differences(part: str, found: dict[str, Any]) -> list[str]:
    """What differs from the record, of the entries that were made here."""
    recorded = expected(part)
    if part == "rows":
        for name in [name for name in found if not comparable(recorded, found, name)]:
            say(f"skipped {name}: its recorded file is another one")
            found = {key: value for key, value in found.items() if key != name}
        recorded = {
            name: one for name, one in recorded.items() if name in found or name not in entries()
        }
        recorded, found = by_policy(recorded), by_policy(found)
    return list(compare(part, recorded, rounded(found)))


def comparable(recorded: dict[str, Any], found: dict[str, Any], name: str) -> bool:
    """Whether both were made from the same file of traffic."""
    theirs = recorded.get(name, found[name])
    return bool(theirs.get("file_sha256") == found[name].get("file_sha256"))


def by_policy(part: dict[str, Any]) -> dict[str, Any]:
    """Rows as mappings, so that a difference names policy and key."""
    return {
        name: {
            "artifacts": one["artifacts"],
            **{
                f"{number} {row[0]}": dict(zip(one["columns"], row, strict=True))
                for number, row in enumerate(one["rows"])
            },
        }
        for name, one in part.items()
    }


def compare(path: str, old: Any, new: Any) -> Iterable[str]:
    """Where two nested values differ; floats may by `TOLERANCE`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key not in new or key not in old:
                yield f"{path}/{key}: {'is gone' if key in old else 'is new'}"
            else:
                yield from compare(f"{path}/{key}", old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from compare(f"{path}[{index}]", *pair)
    elif isinstance(old, float | int) and isinstance(new, float | int):
        if not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-12):
            yield f"{path}: {old} -> {new}"
    elif old != new:
        yield f"{path}: {old!r} -> {new!r}"


def rounded(value: Any) -> Any:
    """Floats with as many digits as are stored; whole numbers and no numbers as JSON has them."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.{DIGITS}g}")
    return value


def write(part: str, found: dict[str, Any]) -> None:
    """Record a part: one line per entry."""
    lines = (f"{json.dumps(k)}: {json.dumps(rounded(v))}" for k, v in found.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (HERE / f"expected_{part}.json").write_text(text, encoding="utf-8")


def main(action: str, *parts: str) -> None:
    """Check or record all parts, or those that are named."""
    if action not in ("--check", "--write") or not set(parts) <= set(PARTS):
        raise SystemExit(__doc__)
    found = {part: PARTS[part]() for part in parts or PARTS}
    if action == "--write":
        if len(found.get("rows", entries())) < len(entries()):
            raise SystemExit("record rows where every entry can be evaluated")
        for part, one in found.items():
            write(part, one)
        return
    lines = [line for part, one in found.items() for line in differences(part, one)]
    sys.stdout.write("\n".join(lines or ["equal"]) + "\n")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["--help"])
