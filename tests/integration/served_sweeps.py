"""A sweep of both problems over scenarios that nothing ships for, and what serves them."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import resources
from pathlib import Path

import yaml

from tune_configs import allocation, routing
from tune_configs.experiment import Experiment

FOLDER = "SERVED_SWEEPS"
"""Environment variable: where `write_scenarios` has put them."""
NAMES = {"routing": "local_cpu", "allocation": "local_cpu_ranks"}


def write_scenarios(folder: Path) -> dict[str, Path]:
    """Copies of the default cluster's scenarios under names that no champion has, by problem."""
    paths = {problem: folder / f"own_{name}.yaml" for problem, name in NAMES.items()}
    for problem, name in NAMES.items():
        shipped = resources.files("tokenyard") / "scenarios" / problem / f"{name}.yaml"
        fields = yaml.safe_load(shipped.read_text(encoding="utf-8")) | {"name": f"own_{name}"}
        if problem == "routing":
            fields["requests_per_stream"] = 3_000
        paths[problem].write_text(yaml.safe_dump(fields))
    return paths


def chain() -> tuple[Experiment, ...]:
    """Routing, where a network that corrects marginal delay is accepted, and allocation, where a
    table that has hardly learned is not."""
    paths = {key: str(path) for key, path in write_scenarios(Path(os.environ[FOLDER])).items()}
    learner = routing.smoke().trials[-1]
    return (
        replace(
            routing.smoke(),
            scenario=paths["routing"],
            trials=(learner.model_copy(update={"scenario": paths["routing"]}),),
            baselines=("sed",),
            baseline="sed",
            promotion_streams=24,
            warm_up=None,
        ),
        replace(
            allocation.smoke(),
            scenario=paths["allocation"],
            trials=(
                allocation._trial(
                    algorithm="sarsa",
                    env_steps=20_000,
                    iterations=1,
                    scenario=paths["allocation"],
                ),
            ),
            baselines=("planner",),
            baseline="planner",
            warm_up=None,
        ),
    )
