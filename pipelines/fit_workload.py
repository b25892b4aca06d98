"""Fit the shipped workload models again, or report how well they imitate their traces.

python pipelines/fit_workload.py            writes tokenyard/workload/models/*.json
python pipelines/fit_workload.py --report   the tables of docs/results/synthetic-workload.md

Traces: Azure LLM inference traces 2023, github.com/Azure/AzurePublicDataset, CC-BY 4.0,
Patel et al., Splitwise, ISCA 2024. Requests after the training part never touch a model.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import tokenyard.workload
from tokenyard.provenance import write_result
from tokenyard.workload.fit import fit_mmpp, fit_workload
from tokenyard.workload.model import WorkloadModel, load_model, poisson_arrivals
from tokenyard.workload.readers import find_trace, read_trace
from tokenyard.workload.statistics import describe
from tokenyard.workload.trace import Trace

MODELS = Path(tokenyard.workload.__file__).parent / "models"
Row = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How one shipped model is fitted."""

    trace: str
    num_train: int
    dt_s: float
    num_states: int


RECIPES = (Recipe("azure_code", 5000, 0.5, 6), Recipe("azure_conv", 7000, 2.0, 3))


@dataclass(frozen=True)
class Args:
    """Fit the shipped workload models again, or report how good they are."""

    report: bool = False
    """Compare the shipped models with the training and the held-out part; write no model."""
    streams: int = 100
    """Synthetic streams per comparison."""
    seed: int = 2026
    """Of the synthetic streams."""
    json: Path | None = None
    """Write the result rows to this file."""


def read_parts(recipe: Recipe) -> tuple[Trace, Trace, str]:
    """Return the training part, the held-out part, and where they come from."""
    path = find_trace(recipe.trace)
    if path is None:
        sys.exit(f"trace {recipe.trace} not found; run python pipelines/fetch_traces.py")
    train, held_out = read_trace(path)[0].split(recipe.num_train)
    provenance = (
        f"first {recipe.num_train} requests of the Azure LLM inference trace 2023 "
        f"({recipe.trace.removeprefix('azure_')}), github.com/Azure/AzurePublicDataset, "
        "CC-BY 4.0; Patel et al., Splitwise, ISCA 2024"
    )
    return train, held_out, provenance


def write_model(recipe: Recipe) -> Row:
    """Fit one model to its training part and write its file."""
    train, _, provenance = read_parts(recipe)
    model = fit_workload(train, recipe.trace, provenance, recipe.dt_s, recipe.num_states)
    path = MODELS / f"{recipe.trace}.json"
    path.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return {"model": model.name, "path": str(path), "bytes": path.stat().st_size}


def choose_states(recipe: Recipe) -> list[Row]:
    """Return the criterion by which the number of states was chosen."""
    train, _, _ = read_parts(recipe)
    fits = {k: fit_mmpp(train.arrival_s, recipe.dt_s, k) for k in range(1, 7)}
    return [{"trace": recipe.trace, "num_states": k, "bic": fits[k].bic} for k in fits]


def compare(recipe: Recipe, num_streams: int, seed: int) -> list[Row]:
    """Return one row per part and source: the trace, the model, and Poisson with its lengths."""
    train, held_out, _ = read_parts(recipe)
    model = load_model(recipe.trace)
    rows = []
    for part, real in (("train", train), ("held-out", held_out)):
        head = {"trace": recipe.trace, "part": part, "num_requests": real.num_requests}
        rows.append(head | {"source": "real", "streams": 1} | describe(real, real))
        if part == "held-out":
            scaled = train.with_rate(real.mean_rate_per_s)
            rows.append(head | {"source": "training part", "streams": 1} | describe(scaled, real))
        for source, imitate in (("model", from_model), ("poisson", from_poisson)):
            measured = measure_streams(model, real, imitate, num_streams, seed)
            rows.append(head | {"source": source, "streams": num_streams} | measured)
    return rows


Imitate = Callable[[WorkloadModel, Trace, np.random.Generator], Trace]


def from_model(model: WorkloadModel, real: Trace, rng: np.random.Generator) -> Trace:
    """Draw a stream as long as `real` and, in the long run, at its rate."""
    return model.generate(real.num_requests, rng, real.mean_rate_per_s)


def from_poisson(model: WorkloadModel, real: Trace, rng: np.random.Generator) -> Trace:
    """Draw the same lengths with Poisson arrivals."""
    arrival_s = poisson_arrivals(real.num_requests, real.mean_rate_per_s, rng)
    return replace(from_model(model, real, rng), arrival_s=arrival_s)


def measure_streams(
    model: WorkloadModel, real: Trace, imitate: Imitate, num_streams: int, seed: int
) -> Row:
    """Return the mean of every statistic over streams, and where nine tenths of the counts' lie."""
    rngs = np.random.default_rng(seed).spawn(num_streams)
    each = [describe(imitate(model, real, rng), real) for rng in rngs]
    row: Row = {}
    for key in each[0]:
        values = [one[key] for one in each]
        row[key] = float(np.mean(values))
        if key.startswith("dispersion"):
            row[f"{key}_p5"], row[f"{key}_p95"] = np.quantile(values, (0.05, 0.95)).tolist()
    return row


def show(console: Console, rows: list[Row], keys: tuple[str, ...]) -> None:
    """Print rows as a Markdown table."""
    table = Table(*keys, box=box.MARKDOWN)
    for row in rows:
        table.add_row(*(_cell(row, key) for key in keys))
    console.print(table)


def _cell(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, float):
        return str(value)
    digits = 3 if key.startswith(("ks", "size")) else 2 if key.startswith(("auto", "rate")) else 1
    text = f"{value:.{digits}f}"
    if f"{key}_p5" in row:
        text += f" ({row[f'{key}_p5']:.{digits}f} .. {row[f'{key}_p95']:.{digits}f})"
    return text


def report(args: Args) -> list[Row]:
    """Print the comparison of every model; return its rows."""
    console = Console(highlight=False, width=200)
    compared = [row for recipe in RECIPES for row in compare(recipe, args.streams, args.seed)]
    ids = ("trace", "part", "source", "num_requests")
    groups = (("ks",), ("dispersion",), ("autocorrelation",), ("rate", "mean", "size"))
    for group in groups:
        keys = [key for key in compared[0] if key.startswith(group)]
        show(console, compared, (*ids, *keys))
    chosen = [row for recipe in RECIPES for row in choose_states(recipe)]
    show(console, chosen, ("trace", "num_states", "bic"))
    return compared + chosen


def main(args: Args) -> None:
    if args.report:
        rows = report(args)
    else:
        rows = [write_model(recipe) for recipe in RECIPES]
        for row in rows:
            print("{model}: {path}, {bytes} bytes".format(**row))
    if args.json:
        write_result(args.json, shlex.join(sys.argv), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
