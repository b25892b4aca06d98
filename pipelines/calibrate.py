"""Fit the performance model to measurements, and report its errors on what was held out.

    python pipelines/calibrate.py                    the tables of docs/results/fidelity.md
    python pipelines/calibrate.py --write            also writes tokenyard/perf/tables/fitted.json
    python pipelines/calibrate.py --iterations FILE  the profile of your own engine instead
    python pipelines/calibrate.py --url http://127.0.0.1:8000 --out mine.yaml
        a scenario of the replicas behind a running gateway, with the profiles that it has of them,
        estimated or declared, or of vLLM's replicas by a Prometheus server: simulate them
        (evaluate.py --scenario mine.yaml), train a policy for them (train.py --fleet mine.yaml)

FILE has the columns prefill_tokens, decoding_sequences, kv_tokens and time_s, one iteration a row.
Kernels and collectives: Vidur, github.com/microsoft/vidur data/profiling, MIT licence.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import tokenyard.perf
from tokenyard.perf import calibration as fits
from tokenyard.perf.coefficients import linear_coefficients
from tokenyard.perf.hardware import Calibration, Kernels, load_gpu, shipped_calibration
from tokenyard.perf.models import Precision
from tokenyard.perf.profiles import (
    VIDUR_FOLDER,
    find_vidur_profiles,
    read_iterations,
    read_kernel_profiles,
)
from tokenyard.perf.published import read_published
from tokenyard.perf.replica import make_replica
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.routing.fleet import EngineSpeed
from tokenyard.routing.live_fleet import write_live
from tokenyard.routing.scenario import load_scenario

FITTED = Path(tokenyard.perf.__file__).parent / "tables" / "fitted.json"
PROFILED_GPUS = {"a100": "a100_80g_sxm", "h100": "h100_sxm"}
PROVENANCE = (
    "kernels and links: Vidur data/profiling, commit 7d47513, MIT licence; engine: Llama-2 7B rows "
    "of lmdeploy v0.1.0a1 docs/en/benchmark/a100_fp16.md; fitted by pipelines/calibrate.py"
)
SHOWN_REPLICAS: tuple[tuple[str, str, int, Precision], ...] = (
    ("a100_80g_sxm", "llama2_7b", 1, "fp16"),
    ("a100_80g_sxm", "llama2_70b", 4, "fp16"),
    ("h100_sxm", "llama3_8b", 1, "fp16"),
    ("h100_sxm", "llama3_70b", 4, "fp16"),
    ("h100_sxm", "llama3_70b", 2, "fp8"),
    ("h200_sxm", "llama3_70b", 2, "fp16"),
    ("l4", "llama3_8b", 1, "fp16"),
    ("a10g", "llama3_8b", 1, "fp16"),
)
Row = dict[str, Any]
_NOT_SHOWN = ("table", "precision")


@dataclass(frozen=True)
class Args:
    """Fit the performance model and report its held-out errors."""

    iterations: Path | None = None
    """CSV of measured iterations to fit instead of the published profiles."""
    url: str | None = None
    """Gateway, or Prometheus server that scrapes vLLM, whose replicas become a scenario."""
    model: str | None = None
    """Which model, where several are served: a scenario has one."""
    token: str | None = None
    """Its bearer token; by default TOKENYARD_TOKEN where that is set."""
    scenario: str = "conversation_mixed_gpus"
    """Name or YAML path: traffic and reward of the new scenario; SLOs are the gateway's."""
    out: Path = Path("live.yaml")
    """Where it is written."""
    write: bool = False
    """Write the fitted parameters into the package."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def find_profiles() -> Path:
    """Return the folder of Vidur's profiles, or stop with what to do."""
    folder = find_vidur_profiles()
    if folder is None:
        sys.exit(f"no folder {VIDUR_FOLDER}; put Vidur's profiles there, under $TOKENYARD_DATA")
    return folder


def calibrate_kernels(folder: Path) -> tuple[dict[str, Kernels], list[Row]]:
    """Fit the kernels of every profiled GPU; return them and their errors."""
    kernels, rows = {}, []
    for name, gpu_name in PROFILED_GPUS.items():
        gpu, profiles = load_gpu(gpu_name), read_kernel_profiles(folder, name)
        kernels[name] = fits.fit_kernels(profiles, gpu)
        transfer = [
            fits.kernel_transfer_mape(profiles, gpu, fitted, held_out)
            for fitted, held_out in (("llama2_7b", "llama2_70b"), ("llama2_70b", "llama2_7b"))
        ]
        rows.append(
            {
                "table": "kernels",
                "gpu": name,
                "measurements": sum(len(profile.tokens) for profile in profiles),
                "fitted_error_fraction": fits.kernel_mape(profiles, gpu, kernels[name]),
                "held_out_70b_error_fraction": transfer[0],
                "held_out_7b_error_fraction": transfer[1],
                "cross_validated_error_fraction": fits.kernel_cross_validated_mape(profiles, gpu),
            }
        )
        rows.append({"table": "kernel_parameters", "gpu": name, **kernels[name].model_dump()})
    return kernels, rows


def link_rows(folder: Path) -> list[Row]:
    """Return latency, bandwidth and errors of every measured collective."""
    rows = []
    for name, measured in fits.MEASURED_LINKS.items():
        for kind in measured.kinds:
            for profile in measured.read(folder, kind):
                fitted = fits.fit_collective(profile, kind)
                rows.append(
                    {
                        "table": "links",
                        "link": name,
                        "collective": kind,
                        "gpus": profile.num_gpus,
                        "latency_us": fitted.latency_s * 1e6,
                        "bandwidth_gb_per_s": fitted.bandwidth_bytes_per_s * 1e-9,
                        "fitted_error_fraction": fits.collective_mape(profile, kind, fitted),
                        "held_out_error_fraction": fits.collective_held_out_mape(profile, kind),
                    }
                )
    return rows


def compare_published(calibration: Calibration) -> tuple[list[Row], list[Row]]:
    """Return one row per published figure, and one per group and role of them."""
    figures = read_published()
    values = fits.predicted(figures, calibration)
    rows = []
    for figure, value in zip(figures, values.tolist(), strict=True):
        error = value / figure.published - 1
        head = {"table": "end_to_end", **figure.model_dump()}
        rows.append(head | {"predicted": value, "error_fraction": error})
    groups = list(dict.fromkeys((row["group"], row["role"]) for row in rows))
    summary = [
        _summary(group, role, [r for r in rows if r["group"] == group]) for group, role in groups
    ]
    for role in ("fitted", "held_out", "further"):
        summary.append(_summary("all", role, [r for r in rows if r["role"] == role]))
    unseen = [row for row in rows if row["role"] != "fitted"]
    summary.append(_summary("all", "held_out and further", unseen))
    return rows, summary


def _summary(group: str, role: str, rows: list[Row]) -> Row:
    errors = np.array([row["error_fraction"] for row in rows])
    return {
        "table": "end_to_end_groups",
        "group": group,
        "role": role,
        "figures": len(errors),
        "mean_abs_error_fraction": float(np.abs(errors).mean()),
        "median_error_fraction": float(np.median(errors)),
        "min_error_fraction": float(errors.min()),
        "max_error_fraction": float(errors.max()),
    }


def coefficient_rows(calibration: Calibration) -> list[Row]:
    """Return the four coefficients of some replicas, and what linearity costs."""
    rows = []
    for gpu, llm, degree, precision in SHOWN_REPLICAS:
        replica = make_replica(gpu, llm, degree, precision=precision, calibration=calibration)
        rows.append(
            {
                "table": "coefficients",
                "gpu": gpu,
                "llm": llm,
                "tensor_parallel": degree,
                "weights": precision,
                "kv_capacity_tokens": replica.kv_capacity_tokens,
                **asdict(linear_coefficients(replica)),
            }
        )
    return rows


def show(console: Console, rows: list[Row]) -> None:
    """Print rows as a Markdown table."""
    keys = [key for key in rows[0] if key not in _NOT_SHOWN]
    table = Table(*(key.removesuffix("_fraction") for key in keys), box=box.MARKDOWN)
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in keys))
    console.print(table)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def calibrate_published(args: Args, console: Console) -> list[Row]:
    """Fit kernels, links and engine to the published measurements; return all rows."""
    folder = find_profiles()
    kernels, kernel_rows = calibrate_kernels(folder)
    links = {
        name: fits.fit_link(folder, measured) for name, measured in fits.MEASURED_LINKS.items()
    }
    before = Calibration(
        provenance=PROVENANCE, kernels=kernels, links=links, engine=shipped_calibration().engine
    )
    fitted_figures = [figure for figure in read_published() if figure.role == "fitted"]
    calibration = fits.with_engine(before, fits.fit_engine(fitted_figures, before))
    collective_rows = link_rows(folder)
    figure_rows, group_rows = compare_published(calibration)
    engine_row = {"table": "engine_parameters", **calibration.engine.model_dump()}
    rows = [*kernel_rows, *collective_rows, engine_row, *group_rows, *figure_rows]
    rows += coefficient_rows(calibration)
    for table in dict.fromkeys(row["table"] for row in rows):
        show(console, [row for row in rows if row["table"] == table])
    if args.write:
        FITTED.write_text(json.dumps(_rounded(calibration.model_dump()), indent=1) + "\n")
        print(f"wrote {FITTED}")
    return rows


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def calibrate_iterations(path: Path, console: Console) -> list[Row]:
    """Fit the four coefficients to one's own iterations; return one row."""
    try:
        profile = read_iterations(path)
        held_out = fits.iterations_held_out_mape(profile)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    fitted = fits.fit_iterations(profile)
    row = {
        "table": "iterations",
        "measurements": len(profile.time_s),
        **asdict(fitted),
        "held_out_error_fraction": held_out,
    }
    show(console, [row])
    prefill, sequences, kv = profile.batches
    seen = {"max_batch": sequences, "token_budget": prefill + sequences, "kv_capacity_tokens": kv}
    known = {key: f"{row[key]:.4g}" for key in EngineSpeed.model_fields if key in row}
    known |= {key: f"{max(values.max(), 1):.0f}" for key, values in seen.items()}
    print(f"profile: {{{', '.join(f'{key}: {value}' for key, value in known.items())}}}")
    print(f"# {', '.join(seen)}: the most seen in {path}; put the engine's own limits there")
    for name in fits.undetermined(profile, fitted):
        print(f"warning: {name} is not told from 0 by these iterations", file=sys.stderr)
    return [row]


def calibrate_live(args: Args, console: Console) -> list[Row]:
    """Write the scenario of the replicas behind a gateway; return their speeds, a row each."""
    try:
        if args.out.suffix not in (".yaml", ".yml"):
            raise ValueError(f"--out {args.out} must end in .yaml: scenarios are named by that")
        base = load_scenario(args.scenario)
        rows, description = write_live(args.url or "", args.out, base, args.model, args.token)
        capacity = load_scenario(str(args.out)).capacity_tokens_per_s
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    show(console, rows)
    print(f"wrote {args.out}: {len(rows)} replicas, {capacity:.0f} tokens/s in all")
    print(description)
    return rows


def main(args: Args) -> None:
    console = Console(highlight=False, width=220)
    if args.url:
        rows = calibrate_live(args, console)
    elif args.iterations:
        rows = calibrate_iterations(args.iterations, console)
    else:
        rows = calibrate_published(args, console)
    write_result(args.json, command_line(), None, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
