"""Fit the shipped workload models again, each to the training part of its public trace.

Traces: Azure LLM inference traces 2023, github.com/Azure/AzurePublicDataset, CC-BY 4.0,
Patel et al., Splitwise, ISCA 2024. Requests after the training part never touch a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

import tokenyard.workload
from tokenyard.workload.fit import fit_workload
from tokenyard.workload.model import WorkloadModel
from tokenyard.workload.readers import find_trace, read_trace
from tokenyard.workload.trace import Trace

MODELS = Path(tokenyard.workload.__file__).parent / "models"


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
    """Fit the shipped workload models again."""

    json: Path | None = None
    """Write the result rows to this file."""


def read_parts(recipe: Recipe) -> tuple[Trace, Trace, str]:
    """Return the training part, the held-out part, and where they come from."""
    path = find_trace(recipe.trace)
    if path is None:
        raise SystemExit(f"trace {recipe.trace} not found; run python pipelines/fetch_traces.py")
    train, held_out = read_trace(path)[0].split(recipe.num_train)
    provenance = (
        f"first {recipe.num_train} requests of the Azure LLM inference trace 2023 "
        f"({path.name.split('_')[1].removesuffix('.csv')}), github.com/Azure/AzurePublicDataset, "
        "CC-BY 4.0; Patel et al., Splitwise, ISCA 2024"
    )
    return train, held_out, provenance


def fit(recipe: Recipe) -> WorkloadModel:
    """Fit one model to its training part."""
    train, _, provenance = read_parts(recipe)
    return fit_workload(train, recipe.trace, provenance, recipe.dt_s, recipe.num_states)


def main(args: Args) -> None:
    for recipe in RECIPES:
        model = fit(recipe)
        path = MODELS / f"{recipe.trace}.json"
        path.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(tyro.cli(Args))
