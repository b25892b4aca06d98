"""Compare the performance model with NVIDIA's step times, fit it to a third, report on the rest.

make rivals                                 the wheel, in an environment of its own
python -m benchmarks.step_times             the tables of docs/results/performance-model.md
python -m benchmarks.step_times --write     also writes tokenyard/perf/tables/step_times.json

No GPU and no network are needed once the environment is there. The step times are NVIDIA's: they
stay in a temporary file, unless `--times` names where to keep them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import tokenyard.perf
from benchmarks.step_times.figure import draw
from tokenyard.figures import save_figures
from tokenyard.perf.coefficients import linear_coefficients
from tokenyard.perf.hardware import Calibration, Gpu, load_gpu
from tokenyard.perf.replica import Replica
from tokenyard.perf.step_times import (
    KINDS,
    StepErrors,
    StepTimes,
    fit_step_times,
    mean_calibration,
    modelled,
    read_step_times,
    split_third,
    step_ratios,
)
from tokenyard.provenance import ResultFile, command_line, write_result

FITTED = Path(tokenyard.perf.__file__).parent / "tables" / "step_times.json"
EXPORT = Path(__file__).with_name("export.py")
Row = dict[str, Any]


@dataclass(frozen=True)
class Args:
    """Compare the performance model with NVIDIA's step times."""

    python: Path = Path(".rivals/aiconfigurator/bin/python")
    """Python of the environment that has the wheel."""
    times: Path | None = None
    """CSV of the step times: read where it exists, else kept there."""
    seed: int = 0
    """Of the third that is fitted."""
    write: bool = False
    """Write the fitted parameters into the package."""
    figure: Path | None = None
    """Draw the errors before and after."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


@dataclass(frozen=True)
class Kind:
    """One kind of GPU: its steps, divided, and what was fitted to the third."""

    fitted: list[StepTimes]
    held_out: list[StepTimes]
    calibration: Calibration


def export(python: Path, csv: Path) -> None:
    """Let the wheel print its grid into a file, or stop with what to do."""
    if not python.exists():
        sys.exit(
            f"no {python}: make the environment as {Path(__file__)} says, or name its --python"
        )
    with csv.open("w", encoding="utf-8") as out:
        # It logs warnings by the dozen about models that are not asked for.
        done = subprocess.run([python, EXPORT], stdout=out, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{EXPORT} failed: {done.stderr.strip().splitlines()[-1]}")


def load(args: Args) -> dict[str, list[StepTimes]]:
    """Return the steps of every system, exported now or read."""
    with tempfile.TemporaryDirectory() as folder:
        csv = args.times or Path(folder) / "times.csv"
        if not csv.exists():
            export(args.python, csv)
        with csv.open(encoding="utf-8") as lines:
            times = read_step_times(lines)
    return {system: [one for one in times if one.system == system] for system in KINDS}


def fit(times: Mapping[str, list[StepTimes]], seed: int) -> dict[str, Kind]:
    """Fit every kind of GPU to its third."""
    kinds = {}
    for system, of_system in times.items():
        fitted, held_out = split_third(of_system, seed)
        kinds[system] = Kind(fitted, held_out, fit_step_times(fitted))
    return kinds


def error_row(table: str, system: str, of: Mapping[str, np.ndarray], **more: str) -> Row:
    """Return one row: the errors of every variant in `of`, which maps its name to its ratios."""
    row: Row = {"table": table, "gpu": KINDS[system].gpu, **more}
    row["num_steps"] = next(iter(of.values())).size
    for what, ratio in of.items():
        row |= {f"{what}_{key}": value for key, value in asdict(StepErrors.of(ratio)).items()}
    return row


def held_out_rows(kinds: Mapping[str, Kind]) -> list[Row]:
    """Errors on the two thirds, by kind of GPU and of step: before, fitted, fitted with less."""
    rows = []
    for system, kind in kinds.items():
        gpu, before = modelled(system)
        less = fit_step_times(kind.fitted, attention_overhead=False)
        ratios = {
            "before": step_ratios(kind.held_out, before, gpu),
            "without_attention_overhead": step_ratios(kind.held_out, less),
            "fitted": step_ratios(kind.held_out, kind.calibration),
        }
        for step in ratios["before"]:
            of_step = {what: of_steps[step] for what, of_steps in ratios.items()}
            rows.append(error_row("held_out", system, of_step, step=step))
    return rows


def replica_rows(kinds: Mapping[str, Kind]) -> list[Row]:
    """Errors on the two thirds of every replica, by model and degree."""
    rows = []
    for system, kind in kinds.items():
        gpu, before = modelled(system)
        for one in kind.held_out:
            ratios = {
                "before": step_ratios([one], before, gpu)["all"],
                "fitted": step_ratios([one], kind.calibration)["all"],
            }
            replica = f"{one.llm} x {one.tensor_parallel}"
            rows.append(error_row("replicas", system, ratios, replica=replica))
    return rows


def one_gpu_rows(kinds: Mapping[str, Kind]) -> list[Row]:
    """Errors on the two thirds of Llama-3 8B on one GPU, as scenarios have it, by kind of step."""
    rows = []
    for system, kind in kinds.items():
        gpu, before = modelled(system)
        replica = [o for o in kind.held_out if (o.llm, o.tensor_parallel) == ("llama3_8b", 1)]
        earlier, fitted = step_ratios(replica, before, gpu), step_ratios(replica, kind.calibration)
        for step in earlier:
            of_step = {"before": earlier[step], "fitted": fitted[step]}
            rows.append(error_row("one_gpu", system, of_step, step=step))
    return rows


def other_model_rows(times: Mapping[str, list[StepTimes]], kinds: Mapping[str, Kind]) -> list[Row]:
    """Errors on a model that was not fitted, at the degrees that were."""
    rows = []
    for system, of_system in times.items():
        for llm in ("llama3_8b", "llama3_70b"):
            known = [one for one in kinds[system].fitted if one.llm != llm]
            degrees = {1} | {one.tensor_parallel for one in known}
            unseen = [o for o in of_system if o.llm == llm and o.tensor_parallel in degrees]
            ratio = {"predicted": step_ratios(unseen, fit_step_times(known))["all"]}
            rows.append(error_row("other_model", system, ratio, predicted_llm=llm))
    return rows


def other_gpu_rows(times: Mapping[str, list[StepTimes]], kinds: Mapping[str, Kind]) -> list[Row]:
    """Errors on one GPU of a kind that was not fitted: with the others' mean, as the nearest."""
    rows = []
    for system, of_system in times.items():
        kernels, nearest = load_gpu(KINDS[system].gpu).kernels, KINDS[system].nearest
        alone = [one for one in of_system if one.tensor_parallel == 1]
        others = {name: kind.calibration for name, kind in kinds.items() if name != system}
        derived = {
            "mean": mean_calibration(kernels, others.values()),
            "nearest": mean_calibration(kernels, [others[nearest]]),
        }
        ratios = {what: step_ratios(alone, one)["all"] for what, one in derived.items()}
        rows.append(error_row("other_gpu", system, ratios, nearest=KINDS[nearest].gpu))
    return rows


def linear_rows(kinds: Mapping[str, Kind]) -> list[Row]:
    """Errors of the four coefficients that simulators step, on held-out steps of their grid."""
    rows = []
    for system, kind in kinds.items():
        gpu, before = modelled(system)
        ratios = {
            "before": _linear_ratio(kind.held_out, before, gpu),
            "fitted": _linear_ratio(kind.held_out, kind.calibration, None),
        }
        rows.append(error_row("linear", system, ratios))
    return rows


def _linear_ratio(
    held_out: Sequence[StepTimes], calibration: Calibration, gpu: Gpu | None
) -> np.ndarray:
    short = [one.select(one.is_short) for one in held_out]
    return np.concatenate(
        [_linear_s(one.replica(calibration, gpu), one) / one.time_s for one in short]
    )


def _linear_s(replica: Replica, times: StepTimes) -> np.ndarray:
    _, prefill, _, decode, kv = times.batches
    return linear_coefficients(replica).time_s(prefill, decode, kv)


def parameter_rows(kinds: Mapping[str, Kind]) -> list[Row]:
    """What was fitted, a row per kind of GPU."""
    rows = []
    for system, kind in kinds.items():
        (kernels,), (link,) = kind.calibration.kernels.values(), kind.calibration.links.values()
        engine = kind.calibration.engine
        links = {
            f"all_reduce_{degree}": f"{one.latency_s * 1e6:.0f} us, "
            f"{one.bandwidth_bytes_per_s * 1e-9:.3g} GB/s"
            for degree, one in link.all_reduce.items()
        }
        rows.append(
            {
                "table": "parameters",
                "gpu": KINDS[system].gpu,
                "compute": kernels.compute_efficiency,
                "memory": kernels.memory_efficiency,
                "sharpness": kernels.sharpness,
                "kv": engine.kv_efficiency,
                "attention": engine.attention_efficiency,
                "layer_us": 2e6 * kernels.linear_overhead_s,
                "attention_us": 1e6 * engine.attention_overhead_s,
                "iteration_ms": 1e3 * engine.iteration_overhead_s,
                **links,
            }
        )
    return rows


def show(console: Console, rows: list[Row]) -> None:
    """Print rows as a Markdown table."""
    keys = [key for key in rows[0] if key != "table"]
    titles = (key.removesuffix("_fraction").replace("_", " ") for key in keys)
    table = Table(*titles, box=box.MARKDOWN)
    for row in rows:
        table.add_row(*(_cell(key, row[key]) for key in keys))
    console.print(table)


def _cell(key: str, value: Any) -> str:
    if key.endswith("_fraction"):
        return f"{100 * value:.1f} %"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def rounded(value: Any) -> Any:
    """Keep five digits of every number."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(args: Args) -> None:
    console = Console(highlight=False, width=260)
    times = load(args)
    kinds = fit(times, args.seed)
    rows = [
        *held_out_rows(kinds),
        *replica_rows(kinds),
        *one_gpu_rows(kinds),
        *other_model_rows(times, kinds),
        *other_gpu_rows(times, kinds),
        *linear_rows(kinds),
        *parameter_rows(kinds),
    ]
    for table in dict.fromkeys(row["table"] for row in rows):
        console.print(f"\n{table}")
        show(console, [row for row in rows if row["table"] == table])
    if args.write:
        shipped = {
            load_gpu(KINDS[s].gpu).kernels: k.calibration.model_dump() for s, k in kinds.items()
        }
        FITTED.write_text(json.dumps(rounded(shipped), indent=1) + "\n", encoding="utf-8")
    if args.figure:
        drawn = draw([row for row in rows if row["table"] == "held_out"])
        save_figures({args.figure.stem: drawn}, args.figure.parent)
    if args.json:
        write_result(args.json, command_line(), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
