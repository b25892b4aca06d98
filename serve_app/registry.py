"""Finds champions in an MLflow model registry."""

from __future__ import annotations

from pathlib import Path

from tokenyard.artifact import ArtifactError, RegistryLookup

ALIAS = "champion"


def mlflow_lookup(tracking_uri: str) -> RegistryLookup:
    """Return the lookup for `tokenyard.artifact.resolve_champion` over a registry.

    Args:
        tracking_uri: Any URI that MLflow takes, such as sqlite:///mlflow.db.
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
            version = client.get_model_version_by_alias(model, ALIAS)
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


def _policy_file(folder: Path, model: str) -> Path:
    files = [folder] if folder.is_file() else sorted(folder.glob("**/*.npz"))
    if len(files) != 1:
        raise ArtifactError(f"{model} holds {len(files)} npz files; it must hold one")
    return files[0]


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
