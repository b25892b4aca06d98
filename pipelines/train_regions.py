"""Search for a regional policy over one or several clusters, and write it as an artifact.

python pipelines/train_regions.py --scenarios abilene,polska,gabriel --out generic.npz
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from tokenyard.regions.artifact import RegionArtifact
from tokenyard.regions.scenario import load_regions
from tokenyard.regions.search import RegionSearch, RegionSearchConfig


@dataclass(frozen=True)
class Args:
    """Search by the cross-entropy method; progress is kept, and taken up again."""

    out: Path
    """The artifact; beside it a .json with the state of the search."""
    scenarios: str = "abilene,polska,gabriel"
    """Names or YAML paths, separated by commas."""
    generations: int = 24
    population: int = 24
    slots: int = 160
    """Length of training episodes."""
    start: Path | None = None
    """Artifact to start from; by default all parameters are zero."""
    spread: float = 1.0
    """How far the first generation looks, as a share of the usual."""
    elites: int = 6
    seed: int = 0


def main(args: Args) -> None:
    try:
        scenarios = [load_regions(name) for name in args.scenarios.split(",")]
    except ValueError as error:
        print(f"train_regions: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    config = RegionSearchConfig(
        population=args.population,
        num_elites=args.elites,
        slots=args.slots,
        spread=args.spread,
        num_generations=args.generations,
    )
    start = RegionArtifact.load(args.start).arrays["theta"] if args.start else None
    search = RegionSearch(scenarios, config, args.seed, start)
    saved = args.out.with_suffix(".json")
    if saved.exists():
        search.restore(json.loads(saved.read_text(encoding="utf-8")))
    while search.generation < args.generations:
        found = search.step()
        saved.write_text(json.dumps(search.state()), encoding="utf-8")
        numbers = " ".join(f"{key} {value:.4f}" for key, value in found.items())
        print(f"generation {search.generation}: {numbers}", flush=True)
        search.artifact().save(args.out)
    cost = search.validate()
    print(f"validation: cost over start {cost:.4f}")
    search.artifact({"cost_over_start": cost}, {"seed": str(args.seed)}).save(args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
