"""The MLflow registry of policies: find, register, offer, promote, go back.

A registered model `tokenyard-<problem>-<scenario>` has one version per policy, a plain folder with
one npz file, told apart by its hash. Aliases say what a version is: `candidate` was offered last,
`champion` only moves to one that was accepted, `previous` was champion before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.artifact import RegisteredPolicy, RegistryError, RegistryLookup, model_name
from tokenyard.problem import TrainedPolicy

# MLflow takes seconds to import, and most servers run without a registry: functions import it.
if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
CANDIDATE = "candidate"
PREVIOUS = "previous"
STORE_ARTIFACTS = "mlartifacts"
"""Folder of all runs' artifacts, beside a store that is a file."""
ARTIFACT_FOLDER = "policy"
"""Folder of a run's artifacts that is registered."""
ARTIFACT_FILE = "artifact.npz"
"""The policy in it, and in every checkpoint of a trial."""
_HASH_TAG = "sha256"
_OFFERS, _PROMOTIONS = "tokenyard-train", "tokenyard-promotions"
"""MLflow experiments of policies that no sweep has logged."""


@dataclass(frozen=True)
class Registration:
    """Where an artifact ended up in the registry."""

    model: str
    version: str
    alias: str
    """`champion`, or `candidate` where it was not accepted."""
    run_id: str
    """Run that logged the version."""
    sha256: str


def connect(tracking_uri: str) -> MlflowClient:
    """Client of a store and its registry, by any URI that MLflow takes."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def mlflow_lookup(tracking_uri: str, alias: str = CHAMPION) -> RegistryLookup:
    """Return the lookup for `tokenyard.artifact.Artifact.champion` over a registry.

    A file that is not there, such as sqlite:///mlflow.db, holds nothing and is not made. The lookup
    raises RegistryError where the registry or its files cannot be read.
    """

    def lookup(model: str) -> RegisteredPolicy | None:
        if is_missing(tracking_uri):
            return None
        with registry_errors(tracking_uri):
            client = _impatient(tracking_uri)
            version = version_of(client, model, alias)
        if version is None:
            return None
        what = f"{model} version {version.version}"
        with registry_errors(f"{tracking_uri}: files of {what} cannot be read"):
            folder = _download(client, version)
        path = _policy_file(folder, what)
        return RegisteredPolicy(path, str(version.version), alias, version.run_id or None)

    return lookup


def find_registered(
    tracking_uri: str, problem: str, scenario: str, alias: str = CHAMPION
) -> RegisteredPolicy | None:
    """Look up what a server is to serve; None: no version has that alias.

    Raises:
        RegistryError: The registry cannot be read, or is a file that is not there.
    """
    _refuse_missing(tracking_uri)
    return mlflow_lookup(tracking_uri, alias)(model_name(problem, scenario))


def is_missing(tracking_uri: str) -> bool:
    """Whether a store is a file that is not there: MLflow would make it, with all its tables."""
    path = tracking_uri.removeprefix("sqlite:///")
    return path != tracking_uri and not Path(path).is_file()


def _refuse_missing(tracking_uri: str) -> None:
    if is_missing(tracking_uri):
        raise RegistryError(f"registry {tracking_uri}: there is no such file")


def version_of(client: MlflowClient, model: str, alias: str = CHAMPION) -> ModelVersion | None:
    """The version behind an alias; None where there is no model or no alias."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(model, alias)
    except MlflowException as error:
        # SQLite stores say INVALID_PARAMETER_VALUE for a missing alias, servers may say the other.
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def register(
    client: MlflowClient,
    model: str,
    run_id: str,
    artifact: TrainedPolicy,
    accepted: Callable[[], bool],
) -> Registration:
    """Register the artifact that lies in the run's folder `policy`; settle who is champion.

    It is the model's `candidate` in any case, so that it can be served whoever is champion.
    `accepted` says whether it may be champion, set against the one there is. It is not called where
    it is, and called again where another has become champion meanwhile.
    """
    version = _find(client, model, artifact) or _add(client, model, run_id, artifact)
    client.set_registered_model_alias(model, CANDIDATE, version)
    champion = aliases_of(client, model).get(CHAMPION)
    while champion != version and accepted():
        judged_against, champion = champion, aliases_of(client, model).get(CHAMPION)
        if champion == judged_against:
            _crown(client, model, version)
            champion = version
    made_by = client.get_model_version(model, version).run_id or run_id
    alias = CHAMPION if champion == version else CANDIDATE
    return Registration(model, version, alias, made_by, artifact.sha256)


def _crown(client: MlflowClient, model: str, version: str) -> None:
    """Make a version champion; the one before keeps the alias `previous`."""
    aliases = promoted(aliases_of(client, model), version)
    for alias in (PREVIOUS, CHAMPION):
        if alias in aliases:
            client.set_registered_model_alias(model, alias, aliases[alias])


def offer(client: MlflowClient, model: str, artifact: TrainedPolicy) -> str:
    """Register an artifact as `candidate`, whoever is champion; return its version.

    It is logged into a run of its own, with its metrics and lineage.

    Raises:
        RegistryError: The registry cannot be written.
    """
    with registry_errors(client.tracking_uri):
        run_id = _log(client, _OFFERS, model, artifact)
        version = _find(client, model, artifact) or _add(client, model, run_id, artifact)
        client.set_registered_model_alias(model, CANDIDATE, version)
        return version


def enter(
    tracking_uri: str, model: str, artifact: TrainedPolicy, tags: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Register an artifact before its promotion, with tags, unless its hash is there.

    Returns its version, and the model's versions by alias. No alias moves.

    Raises:
        ArtifactError: The registry cannot be written.
    """
    with registry_errors(tracking_uri):
        client = _impatient(tracking_uri)
        version = _find(client, model, artifact)
        if version is None:
            version = _add(client, model, _log(client, _PROMOTIONS, model, artifact), artifact)
        # A policy from a sweep is registered with the run that made it.
        run = client.get_model_version(model, version).run_id or "unknown"
        known_tags = {key: value for key, value in tags.items() if value != "unknown"}
        made_of = {_HASH_TAG: artifact.sha256, "lineage.sweep_run": run} | known_tags
        for key, value in made_of.items():
            client.set_model_version_tag(model, version, key, value)
        return version, aliases_of(client, model)


def aliases_of(client: MlflowClient, model: str) -> dict[str, str]:
    """Versions of a registered model by alias."""
    aliases = client.get_registered_model(model).aliases
    return {alias: str(version) for alias, version in aliases.items()}


def promoted(before: Mapping[str, str], version: str) -> dict[str, str]:
    """Versions of `champion` and `previous` once a version is champion."""
    champion, previous = before.get(CHAMPION), before.get(PREVIOUS)
    if champion != version:
        previous = champion or previous
    return {CHAMPION: version} | ({} if previous is None else {PREVIOUS: previous})


def settle(
    tracking_uri: str, model: str, wanted: Mapping[str, str], known: Collection[str]
) -> bool:
    """Move `champion` and `previous` to the wanted versions, remove others; return whether it did.

    If the champion is not among `known`, somebody else has promoted it since, and nothing changes.

    Raises:
        ArtifactError: The registry cannot be written, or its file is missing; a retry is safe.
    """
    # A registry that is away for a while must not be replaced by a new one.
    _refuse_missing(tracking_uri)
    with registry_errors(tracking_uri):
        client = _impatient(tracking_uri)
        now = aliases_of(client, model)
        if now.get(CHAMPION) not in {None, wanted.get(CHAMPION), *known}:
            return False
        # The champion moves first: serving depends on it.
        for alias in (CHAMPION, PREVIOUS):
            if alias in wanted and now.get(alias) != wanted[alias]:
                client.set_registered_model_alias(model, alias, wanted[alias])
            elif alias in now and alias not in wanted:
                client.delete_registered_model_alias(model, alias)
    return True


def _impatient(tracking_uri: str) -> MlflowClient:
    # By default MLflow goes on for minutes; by then whoever asked has been told that it failed.
    fail_soon()
    return connect(tracking_uri)


def fail_soon() -> None:
    """Let this process give up on a registry that does not answer within seconds."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")


def _find(client: MlflowClient, model: str, artifact: TrainedPolicy) -> str | None:
    """Return the version of the same policy, which a resumed sweep registers again."""
    versions = client.search_model_versions(f"name = '{model}'")
    return {v.tags.get(_HASH_TAG): str(v.version) for v in versions}.get(artifact.sha256)


def _add(client: MlflowClient, model: str, run_id: str, artifact: TrainedPolicy) -> str:
    if not client.search_registered_models(f"name = '{model}'"):
        client.create_registered_model(model)
    version = client.create_model_version(
        model,
        source=f"{client.get_run(run_id).info.artifact_uri}/{ARTIFACT_FOLDER}",
        run_id=run_id,
        tags={_HASH_TAG: artifact.sha256, "trainer": artifact.metadata.trainer},
    )
    return str(version.version)


def log_artifact(client: MlflowClient, run_id: str, artifact: TrainedPolicy) -> None:
    """Put an artifact into the folder of a run from which it is registered."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ARTIFACT_FILE
        artifact.save(path)
        client.log_artifact(run_id, str(path), ARTIFACT_FOLDER)


def _log(client: MlflowClient, experiment: str, model: str, artifact: TrainedPolicy) -> str:
    """Log an artifact with its metrics and lineage into a run of its own; return the run's id."""
    number = open_experiment(client, experiment)
    run_id = str(client.create_run(number, run_name=f"{model}-{artifact.sha256}").info.run_id)
    log_artifact(client, run_id, artifact)
    for key, value in artifact.metadata.metrics.items():
        client.log_metric(run_id, key, value)
    for key, text in artifact.metadata.lineage.items():
        client.set_tag(run_id, f"lineage.{key}", text)
    client.set_terminated(run_id)
    return run_id


def open_experiment(client: MlflowClient, name: str) -> str:
    """Find or create an MLflow experiment, and return its id.

    A store that is a file keeps its artifacts beside itself; MLflow's default is the working
    directory.
    """
    existing = client.get_experiment_by_name(name)
    if existing is not None:
        return str(existing.experiment_id)
    path = client.tracking_uri.removeprefix("sqlite:///")
    is_file = path != client.tracking_uri
    location = (Path(path).resolve().parent / STORE_ARTIFACTS).as_uri() if is_file else None
    # Makes MLflow's page open on runs and curves instead of language-model traces.
    tags = {"mlflow.experimentKind": "custom_model_development"}
    return str(client.create_experiment(name, location, tags))


def _download(client: MlflowClient, version: ModelVersion) -> Path:
    from mlflow.artifacts import download_artifacts

    return Path(download_artifacts(artifact_uri=version.source, tracking_uri=client.tracking_uri))


def _policy_file(folder: Path, what: str) -> Path:
    files = [folder] if folder.is_file() else sorted(folder.glob("**/*.npz"))
    if len(files) != 1:
        raise RegistryError(f"{what} holds {len(files)} npz files; it must hold one")
    return files[0]


@contextmanager
def registry_errors(registry: str) -> Iterator[None]:
    """Turn what MLflow says into one sentence that names the registry."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        lines = str(error).strip().splitlines()
        sentence = lines[0] if lines else type(error).__name__
        raise RegistryError(f"registry {registry}: {sentence}") from None
