"""What the parts found: files for `pipelines/calibrate.py`, summary.json and summary.md.

Needs no GPU. Of every table of iterations: the error of the performance model on a held-out third,
before and after it was fitted to the rest. Of the fleet: policies as measured, beside a forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from benchmarks.gpu import fleet
from benchmarks.gpu.cells import Deadline, Table
from benchmarks.gpu.shapes import SHAPES
from tokenyard.perf.calibration import fit_iterations, fit_replica, held_out_third, mape
from tokenyard.perf.hardware import load_gpu
from tokenyard.perf.iteration import iteration_s
from tokenyard.perf.models import Llm
from tokenyard.perf.profiles import ITERATION_COLUMNS, read_iterations
from tokenyard.perf.replica import Replica
from tokenyard.provenance import command_line, git_sha, write_result
from tokenyard.routing.live_fleet import live_scenario
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.twin import agreement, simulate
from tokenyard.workload.trace import Trace

KINDS = {
    "H100": "h100_sxm", "H200": "h200_sxm", "A100": "a100_80g_sxm", "L4": "l4", "A10G": "a10g",
}  # fmt: skip
"""Word in a card's name to what the performance model knows it as."""
Row = dict[str, Any]


def run(out: Path, device: str, tiny: bool, deadline: Deadline) -> bool:
    """Write what there is; always complete."""
    rows = [_errors(out, *one) for one in _measured(out)]
    if (out / "fleet_requests.csv").is_file():
        rows += _policies(out, fleet.TINY if tiny else fleet.FULL)
    if (out / "equality.csv").is_file():
        checks = pd.read_csv(out / "equality.csv").replace(np.nan, None)
        rows += [{"table": "equality", **one} for one in checks.to_dict("records")]
    write_result(out / "summary.json", command_line(), 0, rows)
    tables = [[row for row in rows if row["table"] == name] for name in _names(rows)]
    head = f"# benchmarks/gpu at {git_sha()}\n"
    (out / "summary.md").write_text("\n".join([head, *map(_markdown, tables)]), encoding="utf-8")
    print(f"wrote {out / 'summary.md'}")
    return True


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["table"] for row in rows))


def _measured(out: Path) -> list[tuple[str, str, str]]:
    """Name, model and device of every table of iterations, which is written for calibrate.py."""
    found = []
    for path in sorted(out.glob("grid_*.csv")):
        row = pd.read_csv(path).iloc[0]
        found.append((path.stem, row["model"], row["device"]))
    profiles = out / "fleet_profiles.csv"
    for _, row in pd.read_csv(profiles).iterrows() if profiles.is_file() else ():
        found.append((f"fleet_iterations_{row['engine']}", row["model"], row["device"]))
    return found


def _errors(out: Path, name: str, model: str, device: str) -> Row:
    frame = pd.read_csv(out / f"{name}.csv")
    path = out / f"calibrate_{name}.csv"
    frame[list(ITERATION_COLUMNS)].to_csv(path, index=False)
    profile = read_iterations(path)
    fitted, held_out = held_out_third(profile)
    linear = fit_iterations(fitted).time_s(*held_out.batches)
    row = {
        "table": "iterations", "name": name, "model": model, "device": device,
        "measurements": len(profile.time_s),
        "four_coefficients_error_fraction": mape(linear, held_out.time_s),
    }  # fmt: skip
    kind = next((KINDS[word] for word in device.replace("-", " ").split() if word in KINDS), None)
    if kind is None:  # The model knows no such device, so it has nothing to say before.
        return row | {"before_error_fraction": None, "after_error_fraction": None}
    llm = Llm(name=model, source="random weights", **SHAPES[model]._asdict())
    before = Replica(load_gpu(kind), llm)
    after = replace(before, calibration=fit_replica(fitted, before))
    for when, replica in (("before", before), ("after", after)):
        told_s = iteration_s(replica, *held_out.batches)
        row[f"{when}_error_fraction"] = mape(told_s, held_out.time_s)
    return row


def _policies(out: Path, known: fleet.Fleet) -> list[Row]:
    requests = pd.read_csv(out / "fleet_requests.csv")
    names = list(dict.fromkeys(requests["policy"]))
    forecast = _forecast(out, known, requests[requests["policy"] == names[0]], names)
    rows = []
    for name in names:
        mine = requests[requests["policy"] == name]
        rows.append({
            "table": "policies", "policy": name, "requests": len(mine),
            "mean_response_s": float(mine["response_s"].mean()),
            "p99_response_s": float(np.percentile(mine["response_s"], 99)),
            "mean_ttft_s": float(mine["ttft_s"].mean()),
            "p99_ttft_s": float(np.percentile(mine["ttft_s"], 99)),
            "forecast_mean_response_s": forecast[name]["mean_response_s"],
            "forecast_p99_response_s": forecast[name]["p99_response_s"],
        })  # fmt: skip
    measured, simulated = (
        {row["policy"]: row[f"{whose}mean_response_s"] for row in rows}
        for whose in ("", "forecast_")
    )
    return [*rows, {"table": "forecast", **asdict(agreement(measured, simulated))}]


def _forecast(
    out: Path, known: fleet.Fleet, sent: pd.DataFrame, names: list[str]
) -> dict[str, dict[str, float]]:
    """Simulate the same requests on the engines as they were timed."""
    profiles = fleet.read_profiles(Table(out / "fleet_profiles.csv", fleet.PROFILE))
    replicas = [{"name": name, **profile.model_dump()} for name, profile in profiles.items()]
    base = load_scenario(known.scenario)
    path = out / "fleet.yaml"
    live = live_scenario(base, replicas, [], "gpu_fleet")
    path.write_text(yaml.safe_dump(live, sort_keys=False))
    lengths = (sent[name].to_numpy() for name in ("context_tokens", "generated_tokens"))
    trace = Trace(sent["arrival_s"].to_numpy(), *lengths)
    return simulate(load_scenario(str(path)), base.name, trace, names, seed=0)


def _markdown(rows: Sequence[Row]) -> str:
    keys = [key for key in rows[0] if key != "table"]
    lines = [keys, ["---"] * len(keys), *([_cell(row[key]) for key in keys] for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {rows[0]['table']}\n\n{table}\n"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
