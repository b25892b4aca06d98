"""The model registry: artifacts as plain folders, and which one is the champion.

Registered model `tokenyard-<problem>-<scenario>`; its alias `champion` only moves to a candidate
that beat the present one. Serving reads the same names with code of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from tokenyard.problem import Artifact
from tokenyard.routing.artifact import PolicyArtifact

CHAMPION = "champion"
CANDIDATE = "candidate"
ARTIFACT_FOLDER = "policy"
ARTIFACT_FILE = "artifact.npz"
_HASH_TAG = "sha256"
_OFFERS = "tokenyard-finetune"


@dataclass(frozen=True)
class Registration:
    """Where an artifact ended up in the registry."""

    model: str
    version: str
    alias: str
    """`champion`, or `candidate` where the present champion was not beaten."""
    champion_trainer: str
    """Algorithm that made the champion, as it is now."""


def model_name(problem: str, scenario: str) -> str:
    """Name of the registered model."""
    return f"tokenyard-{problem}-{scenario}"


def champion_version(client: MlflowClient, model: str) -> ModelVersion | None:
    """The version behind the alias `champion`; None where there is no model or no alias."""
    try:
        return client.get_model_version_by_alias(model, CHAMPION)
    except MlflowException as error:
        # SQLite stores say INVALID_PARAMETER_VALUE for a missing alias, servers may say the other.
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def load_version(
    client: MlflowClient,
    version: ModelVersion,
    load: Callable[[Path], Artifact] = PolicyArtifact.load,
) -> Artifact:
    """Fetch and read the artifact of a version."""
    folder = download_artifacts(artifact_uri=version.source, tracking_uri=client.tracking_uri)
    return load(Path(folder) / ARTIFACT_FILE)


def register(
    client: MlflowClient,
    model: str,
    run_id: str,
    artifact: Artifact,
    beats: Callable[[Any], bool],
    load: Callable[[Path], Artifact] = PolicyArtifact.load,
) -> Registration:
    """Register the artifact that lies in the run's folder `policy`, and settle who is champion.

    Args:
        client: Client of the store.
        model: Registered model, created where it is missing.
        run_id: Run that logged the artifact.
        artifact: The same artifact, read.
        beats: Whether the artifact beats the one given; asked only if there is a champion.
        load: Reads a policy file.
    """
    version = _find_or_create_version(client, model, run_id, artifact)
    present = champion_version(client, model)
    champion = artifact
    if present is not None and str(present.version) != str(version.version):
        best_so_far = load_version(client, present, load)
        champion = artifact if beats(best_so_far) else best_so_far
    alias = CHAMPION if champion is artifact else CANDIDATE
    client.set_registered_model_alias(model, alias, version.version)
    return Registration(model, str(version.version), alias, champion.metadata.trainer)


def offer(client: MlflowClient, model: str, artifact: Artifact) -> str:
    """Register an artifact as `candidate`, whoever is champion; return its version.

    Args:
        client: Client of the store.
        model: Registered model, created where it is missing.
        artifact: Logged into a run of its own, with its metrics and lineage.
    """
    experiment = client.get_experiment_by_name(_OFFERS)
    number = client.create_experiment(_OFFERS) if experiment is None else experiment.experiment_id
    run = client.create_run(number, run_name=f"{model}-{artifact.sha256}")
    run_id = run.info.run_id
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ARTIFACT_FILE
        artifact.save(path)
        client.log_artifact(run_id, str(path), ARTIFACT_FOLDER)
    for key, value in artifact.metadata.metrics.items():
        client.log_metric(run_id, key, value)
    for key, text in artifact.metadata.lineage.items():
        client.set_tag(run_id, f"lineage.{key}", text)
    client.set_terminated(run_id)
    version = _find_or_create_version(client, model, run_id, artifact)
    client.set_registered_model_alias(model, CANDIDATE, version.version)
    return str(version.version)


def _find_or_create_version(
    client: MlflowClient, model: str, run_id: str, artifact: Artifact
) -> ModelVersion:
    if not client.search_registered_models(f"name = '{model}'"):
        client.create_registered_model(model)
    # A sweep that is resumed after its end must not register the same policy again.
    for version in client.search_model_versions(f"name = '{model}'"):
        if version.tags.get(_HASH_TAG) == artifact.sha256:
            return version
    return client.create_model_version(
        model,
        source=f"{client.get_run(run_id).info.artifact_uri}/{ARTIFACT_FOLDER}",
        run_id=run_id,
        tags={_HASH_TAG: artifact.sha256, "trainer": artifact.metadata.trainer},
    )
