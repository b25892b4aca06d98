"""What a change of structure must not change: rows, decisions, the HTTP schema and help.

PYTHONPATH=.:tests python tests/golden/record.py --check [PART ...]
PYTHONPATH=.:tests python tests/golden/record.py --write [PART ...]

Rows come from the command `pipelines/evaluate.py` on shortened copies of every shipped scenario,
decisions from every shipped policy on drawn states, the schema from both HTTP applications, help
from every verb. `--check` prints what differs from `expected_*.json` and `help/` beside this file
and exits with 1. An intended
difference is recorded with `--write`, and the commit that does says why. Not compared: wall times
(`decision_ms`), and the head of a result file (command, versions, seed, git_sha).
"""

from __future__ import annotations

import difflib
import functools
import gc
import hashlib
import importlib
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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from golden import decisions

from pipelines import cli
from serve_app import app as serving
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.problem import SUITES
from tokenyard.allocation.scenario import allocation_names
from tokenyard.regions.scenario import load_regions, region_names
from tokenyard.routing.artifact import default_rule
from tokenyard.routing.scenario import load_scenario, scenario_names
from tokenyard.workload.paths import data_folders

HERE = Path(__file__).parent
HELP = HERE / "help"
PIPELINES = HERE.parents[1] / "pipelines"
TOLERANCE = 1e-9
DIGITS = 12
SEED = 17
TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1"}
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
    for name in sorted(set(allocation_names()) - set(SUITES["allocation_recurring"])):
        found |= allocation_entries(name)
    for name in region_names():
        scenario = document(load_regions(name), "regions") | {"num_slots": 60}
        policies = None if name == "continents" else REGIONS
        found[f"regions/{name}"] = Entry(scenario, policies, ("--streams", "2"))
    return found


def routing_entries(name: str) -> dict[str, Entry]:
    """The scenario's synthetic and recorded traffic, and for some scenarios all rules."""
    default = default_rule(load_scenario(name))
    scenario = document(load_scenario(name)) | {"requests_per_stream": 300}
    rules = f"champion,{default},{FLEET if 'fleet' in scenario else SERVERS}"
    synthetic = ("--source", "synthetic", "--streams", "2")
    found = {f"routing/{name}": Entry(scenario, rules, synthetic)}
    if name in ("poisson_085", "multi_turn_prefix", "churn"):
        found[f"routing/{name}/all"] = Entry(scenario, None, synthetic)
    held_out = scenario.get("held_out_trace")
    if held_out:
        part = scenario | {"held_out_trace": held_out | {"first": LAST_500[held_out["name"]]}}
        file = RECORDED[held_out["name"]]
        recorded = ("--source", "held-out")
        found[f"routing/{name}/recorded"] = Entry(part, f"champion,{default},sed", recorded, file)
    return found


def allocation_entries(name: str) -> dict[str, Entry]:
    """The scenario's generated and recorded demand, and once all policies with the bounds."""
    scenario = document(load_allocation(name), "allocation")
    demand = scenario.get("demand", {})
    generated = scenario | {"demand": demand | {"source": "generator"}}
    one = ("--streams", "1")
    if name not in decisions.tuned_pools():
        arguments = (*one, "--baseline", "planner")
        return {f"allocation/{name}": Entry(generated, "planner,autoscaler_70", arguments)}
    recorded = scenario | {"demand": demand | {"source": "vm_cpu"}}
    return {
        f"allocation/{name}": Entry(generated, None if name == "l4x4_7b" else ALLOCATION, one),
        f"allocation/{name}/recorded": Entry(
            recorded, "planner,autoscaler_tuned", one, RECORDED["vm_cpu"]
        ),
    }


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
    before = sys.argv, list(sys.path)
    sys.argv, sys.path = command, [str(PIPELINES), *sys.path]
    out, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(errors), patch.dict(os.environ, TERMINAL):
            os.environ.pop("MLFLOW_TRACKING_URI", None)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"{' '.join(command)}: {errors.getvalue()}") from stop
    finally:
        sys.argv, sys.path[:] = before
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


def decisions_part(names: Iterable[str] | None = None) -> dict[str, Any]:
    """What shipped policies decide, all of them or those that are named."""
    known = decisions.entries()
    return {name: known[name]() for name in names or known}


def help_part() -> dict[str, Any]:
    """What `tokenyard --help` and `tokenyard VERB --help` say, line by line."""
    found = {"tokenyard": run_script([cli.__file__, "--help"])}
    for verb, module in cli.verbs().items():
        found[verb] = help_of(verb, f"pipelines.{module}")
    return {name: [line.rstrip() for line in text.splitlines()] for name, text in found.items()}


def help_of(verb: str, name: str) -> str:
    """What a verb says where there are two CPUs: a default is read when its module is loaded."""
    known = importlib.import_module(name)
    del sys.modules[name]
    try:
        with patch("os.cpu_count", return_value=2):
            return run_script([cli.__file__, verb, "--help"])
    finally:
        sys.modules[name] = known
        setattr(sys.modules["pipelines"], name.rpartition(".")[2], known)


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
        with patch.object(serving, "hold_port", return_value=None):
            gateway = serving.GatewayReplica(allocated, options, {})
    finally:
        # What the gateway sets for its process would stay in that of the tests.
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
    return gateway.api.openapi()


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
    "help": help_part,
    "schema": schema_part,
    "rows": rows_part,
}

KNOWN: dict[str, Callable[[], dict[str, Any]]] = {"decisions": decisions.entries, "rows": entries}
"""Entries of parts that may be made of some alone."""


def expected(part: str) -> dict[str, Any]:
    """What was recorded."""
    if part == "help":
        return {path.stem: path.read_text("utf-8").splitlines() for path in HELP.iterdir()}
    text = (HERE / f"expected_{part}.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def differences(part: str, found: dict[str, Any]) -> list[str]:
    """What differs from the record, of the entries that were made here."""
    recorded, known = expected(part), KNOWN.get(part, dict)()
    if part == "rows":
        for name in [name for name in found if not comparable(recorded, found, name)]:
            say(f"skipped {name}: its recorded file is another one")
            found = {key: value for key, value in found.items() if key != name}
    recorded = {key: one for key, one in recorded.items() if key in found or key not in known}
    if part == "rows":
        recorded, found = by_policy(recorded), by_policy(found)
    if part == "help":
        return [
            line for name in {**recorded, **found} for line in texts_differ(name, recorded, found)
        ]
    return list(compare(part, recorded, rounded(found)))


def texts_differ(name: str, old: dict[str, list[str]], new: dict[str, list[str]]) -> Iterable[str]:
    """Lines that differ, as a patch has them."""
    return difflib.unified_diff(old.get(name, []), new.get(name, []), name, name, n=0, lineterm="")


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
    """Record a part: one line per entry, or one file."""
    if part == "help":
        for path in HELP.iterdir():
            path.unlink()
        for name, text in found.items():
            (HELP / f"{name}.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
        return
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
