"""Fit a workload model to a trace of your own, or the shipped ones again.

    python pipelines/fit_workload.py --trace mine.csv --out mine.json   a scenario's `workload:`
    python pipelines/fit_workload.py            writes tokenyard/workload/models/*.json
    python pipelines/fit_workload.py --demand   writes tokenyard/allocation/demand_generator.json

Traces: Azure LLM inference traces 2023, github.com/Azure/AzurePublicDataset, CC-BY 4.0,
Patel et al., Splitwise, ISCA 2024. Requests after the training part never touch a model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

import tokenyard.allocation
import tokenyard.workload
from tokenyard.allocation.demand import fit_shipped_generator
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.workload.fit import fit_own, fit_workload
from tokenyard.workload.model import WorkloadModel
from tokenyard.workload.readers import find_trace, read_trace
from tokenyard.workload.trace_options import TraceOptions

MODELS = Path(tokenyard.workload.__file__).parent / "models"
DEMAND = Path(tokenyard.allocation.__file__).parent / "demand_generator.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class FittedPart:
    """The part of a trace that a shipped model is fitted to, and how."""

    trace: str
    num_train: int
    dt_s: float
    num_states: int
    length_scale: float = 1.0
    suffix: str = ""
    """Of the model's name."""


CODE, CONV = FittedPart("azure_code", 5000, 0.5, 6), FittedPart("azure_conv", 7000, 2.0, 3)
SHIPPED = (
    CODE,
    CONV,
    replace(CODE, length_scale=0.2, suffix="_fifth"),
    replace(CONV, length_scale=0.1, suffix="_tenth"),
)


@dataclass(frozen=True)
class Args(TraceOptions):
    """Fit a workload model to a trace, or the shipped ones again."""

    trace: Path | None = None
    """Trace of your own (docs/workloads.md); None: the shipped models."""
    out: ResultFile | None = None
    """File (.json) for the model of that trace, or for the generator of `--demand`."""
    train_fraction: float = 0.7
    """Share of its requests that is fitted, the first ones; keep the rest to judge policies by."""
    dt_s: float = 1.0
    """Step of its arrival chain, seconds: the shortest burst that is told apart. It is longer where
    there would be more than 50,000."""
    length_scale: float = 1.0
    """Factor on its prompt and output lengths."""
    demand: bool = False
    """Fit the generator of allocation's demand to the Azure VM CPU trace instead."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def write_model(part: FittedPart) -> Row:
    """Fit one shipped model to its training part and write its file."""
    path = find_trace(part.trace)
    if path is None:
        sys.exit(f"trace {part.trace} not found; run python pipelines/fetch_traces.py")
    trace = read_trace(path)[0]
    scaled = ""
    if part.length_scale != 1.0:
        trace = trace.with_lengths_scaled(part.length_scale)
        scaled = f", lengths times {part.length_scale:g}"
    provenance = (
        f"first {part.num_train} requests of the Azure LLM inference trace 2023 "
        f"({part.trace.removeprefix('azure_')}){scaled}, github.com/Azure/AzurePublicDataset, "
        "CC-BY 4.0; Patel et al., Splitwise, ISCA 2024"
    )
    train, name = trace.head(part.num_train), part.trace + part.suffix
    model = fit_workload(train, name, provenance, part.dt_s, part.num_states)
    return _write(model, MODELS / f"{name}.json")


def write_own(args: Args, trace: Path, out: Path) -> Row:
    """Fit a model to the first part of a trace, and write it; ValueError: it cannot be used."""
    if out.suffix != ".json":
        raise ValueError(f"--out {out} must end in .json: scenarios name it by that")
    if not 0 < args.train_fraction <= 1:
        raise ValueError(f"--train-fraction {args.train_fraction} must lie in (0, 1]")
    whole, _ = args.read(trace)
    if args.length_scale != 1.0:
        whole = whole.with_lengths_scaled(args.length_scale)
    train = whole.head(int(args.train_fraction * whole.num_requests))
    provenance = f"first {train.num_requests} of {whole.num_requests} requests of {trace.name}"
    return _write(fit_own(train, out.stem, provenance, args.dt_s), out)


def _write(model: WorkloadModel, path: Path) -> Row:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return {
        "model": model.name,
        "path": str(path),
        "bytes": path.stat().st_size,
        "num_requests": model.num_requests,
        "num_states": len(model.arrivals.rates_per_s),
        "mean_rate_per_s": model.arrivals.mean_rate_per_s,
        "mean_context_tokens": model.mean_context_tokens,
        "mean_output_tokens": model.mean_generated_tokens_overall,
    }


def write_demand(out: Path) -> Row:
    """Fit the generator of allocation's demand, and write it; ValueError: there is no trace."""
    fitted = fit_shipped_generator()
    out.write_text(fitted.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return {
        "model": out.stem,
        "path": str(out),
        "day_std": fitted.day_std,
        "innovation_std": fitted.innovation_std,
    }


def fit(args: Args) -> list[Row]:
    """Fit what is asked for, write it, and print a line for each."""
    if args.demand:
        rows = [write_demand(args.out or DEMAND)]
        print("{path}: a day's level varies by {day_std:.3g}".format(**rows[0]))
        return rows
    if args.trace is not None and args.out is not None:
        rows = [write_own(args, args.trace, args.out)]
    else:
        rows = [write_model(part) for part in SHIPPED]
    for row in rows:
        print(
            "{path}: {num_requests} requests, {mean_rate_per_s:.3g} a second in {num_states} "
            "states, {mean_context_tokens:.4g} + {mean_output_tokens:.4g} tokens".format(**row)
        )
    return rows


def main(args: Args) -> None:
    if not args.demand and (args.trace is None) != (args.out is None):
        sys.exit("fit_workload: give --trace and --out together")
    try:
        rows = fit(args)
    except (ValueError, OSError) as error:
        sys.exit(f"fit_workload: {error}")
    write_result(args.json, command_line(), None, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
