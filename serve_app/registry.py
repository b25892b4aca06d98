"""Finds champions in an MLflow model registry, and writes down who became one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.artifact import ArtifactError, RegistryLookup
from tokenyard.routing.artifact import PolicyArtifact

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS = "champion"
CANDIDATE = "candidate"
"""Alias of the version that was offered last (`pipelines/finetune.py`, `sweep.py`)."""
PREVIOUS = "previous"
"""Alias of the version that was champion before."""
_EXPERIMENT = "tokenyard-promotions"
_HASH_TAG = "sha256"
_FILE = "artifact.npz"


def mlflow_lookup(tracking_uri: str, alias: str = ALIAS) -> RegistryLookup:
    """Return the lookup for `tokenyard.artifact.resolve_champion` over a registry.

    Args:
        tracking_uri: Any URI that MLflow takes, such as sqlite:///mlflow.db.
        alias: Of the version that is looked up.
    """
    # MLflow takes seconds to import, and most servers run without a registry.
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

    client = mlflow.MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    # The only code for what is not there; a wrong alias name is INVALID_PARAMETER_VALUE instead.
    absent = {ErrorCode.Name(RESOURCE_DOES_NOT_EXIST), "INVALID_PARAMETER_VALUE"}

    def lookup(model: str) -> Path | None:
        try:
            version = client.get_model_version_by_alias(model, alias)
        except MlflowException as error:
            if error.error_code in absent:
                return None
            raise ArtifactError(f"registry {tracking_uri}: {_sentence(error)}") from None
        try:
            folder = mlflow.artifacts.download_artifacts(
                artifact_uri=version.source, tracking_uri=tracking_uri
            )
        except (MlflowException, OSError) as error:
            raise ArtifactError(
                f"registry {tracking_uri}: files of {model} version {version.version} "
                f"cannot be read: {_sentence(error)}"
            ) from None
        return _policy_file(Path(folder), f"{model} version {version.version}")

    return lookup


def promote(
    tracking_uri: str, model: str, artifact: PolicyArtifact, tags: Mapping[str, str]
) -> str:
    """Make an artifact the registered champion; the one before keeps the alias `previous`.

    Args:
        tracking_uri: Any URI that MLflow takes.
        model: Registered model, made where it is missing.
        artifact: Registered too, unless one of its hash is.
        tags: Lineage and verdict, written onto the version.

    Returns:
        The version that is champion now.

    Raises:
        ArtifactError: The registry cannot be written; the alias has not moved.
    """
    from mlflow.exceptions import MlflowException

    try:
        client = _writer(tracking_uri)
        version = _find_version(client, model, artifact) or _add_version(client, model, artifact)
        # A policy from a sweep is registered with the run that made it.
        run = client.get_model_version(model, version).run_id or "unknown"
        known = {key: value for key, value in tags.items() if value != "unknown"}
        made_of = {_HASH_TAG: artifact.sha256, "lineage.sweep_run": run} | known
        for key, value in made_of.items():
            client.set_model_version_tag(model, version, key, value)
        before = client.get_registered_model(model).aliases.get(ALIAS)
        if before is not None and str(before) != version:
            client.set_registered_model_alias(model, PREVIOUS, str(before))
        client.set_registered_model_alias(model, ALIAS, version)
    except (MlflowException, OSError) as error:
        raise ArtifactError(f"registry {tracking_uri}: {_sentence(error)}") from None
    return version


def restore(tracking_uri: str, model: str) -> str:
    """Swap the aliases `champion` and `previous`; return the version that is champion now.

    Raises:
        ArtifactError: There is no previous one, or the registry cannot be written.
    """
    from mlflow.exceptions import MlflowException

    try:
        client = _writer(tracking_uri)
        aliases = client.get_registered_model(model).aliases
        if PREVIOUS not in aliases:
            raise ArtifactError(f"registry {tracking_uri}: {model} has no previous champion")
        now, before = str(aliases[PREVIOUS]), aliases.get(ALIAS)
        client.set_registered_model_alias(model, ALIAS, now)
        if before is not None:
            client.set_registered_model_alias(model, PREVIOUS, str(before))
    except (MlflowException, OSError) as error:
        raise ArtifactError(f"registry {tracking_uri}: {_sentence(error)}") from None
    return now


def _writer(tracking_uri: str) -> MlflowClient:
    # MLflow tries for minutes by itself; by then the caller has been told that it did not work.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    import mlflow

    return mlflow.MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def _find_version(client: MlflowClient, model: str, artifact: PolicyArtifact) -> str | None:
    found = client.search_model_versions(f"name = '{model}'")
    hashes = {one.tags.get(_HASH_TAG): str(one.version) for one in found}
    return hashes.get(artifact.sha256)


def _add_version(client: MlflowClient, model: str, artifact: PolicyArtifact) -> str:
    if not client.search_registered_models(f"name = '{model}'"):
        client.create_registered_model(model)
    experiment = client.get_experiment_by_name(_EXPERIMENT)
    number = (
        client.create_experiment(_EXPERIMENT) if experiment is None else (experiment.experiment_id)
    )
    run = client.create_run(number, run_name=f"{model}-{artifact.sha256}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _FILE
        artifact.save(path)
        client.log_artifact(run.info.run_id, str(path), "policy")
    client.set_terminated(run.info.run_id)
    version = client.create_model_version(
        model, source=f"{run.info.artifact_uri}/policy", run_id=run.info.run_id
    )
    return str(version.version)


def _policy_file(folder: Path, model: str) -> Path:
    files = [folder] if folder.is_file() else sorted(folder.glob("**/*.npz"))
    if len(files) != 1:
        raise ArtifactError(f"{model} holds {len(files)} npz files; it must hold one")
    return files[0]


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
