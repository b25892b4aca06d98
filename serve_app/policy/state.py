"""What a gateway must not forget when it crashes or is deployed anew: one small JSON file.

Policies stand in it whole, so that neither a file that is gone nor an alias that has moved changes
who decides after a crash. The file is replaced in one step, and is on the disk before a change is
answered.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from serve_app.policy.audit_log import GATEWAY, Event
from serve_app.policy.card import PolicyCard
from serve_app.policy.experiment import Experiment, Mode
from serve_app.policy.loading import (
    LoadedPolicy,
    from_artifact,
    in_order,
    order_in,
    resolve_policy,
)
from serve_app.policy.manager import PolicyManager
from serve_app.policy.runner import RAY_DEFAULT, PolicyRunner
from serve_app.watched_file import identity_of
from tokenyard.config import FrozenModel
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.routing.scenario import load_scenario

STATE_FILE = "gateway-state.json"
"""Its name beside the decision log."""
_MAX_STATE_BYTES = 256 << 20


class StateError(ValueError):
    """A state file that cannot be used; the text names it and the reason."""


class Remembers(Protocol):
    """A part of the gateway whose state is kept with that of its policies."""

    def saved(self) -> dict[str, Any]:
        """Return what must not be forgotten, as JSON has it."""
        ...

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take it up.

        Raises:
            ValueError: It cannot be used.
        """
        ...


class Configured(FrozenModel):
    """What the cluster file says; another cluster file's policy counts before the state."""

    policy: str
    scenario: str


class StoredPolicy(FrozenModel):
    """A policy that has decided or may."""

    name: str
    explore_fraction: float
    by_hand: bool
    aliases: dict[str, str] | None
    card: PolicyCard
    artifact: str | None
    """The policy file in base64; None: it is a rule."""
    breaker: dict[str, float]

    @classmethod
    def of(cls, runner: PolicyRunner) -> StoredPolicy:
        """Write a policy down."""
        artifact = runner.loaded.artifact
        encoded = None if artifact is None else _encoded(artifact)
        aliases = None if runner.aliases is None else dict(runner.aliases)
        return cls(
            name=runner.name, explore_fraction=runner.explore_fraction, by_hand=runner.by_hand,
            aliases=aliases, card=runner.loaded.card, artifact=encoded,
            breaker=runner.breaker.saved(),
        )  # fmt: skip

    @property
    def label(self) -> str:
        """`name@sha256`, as `PolicyRunner.label`."""
        return f"{self.card.name}@{self.card.sha256}" if self.name != RAY_DEFAULT else RAY_DEFAULT

    def runner(self, manager: PolicyManager) -> PolicyRunner:
        """Make the policy again.

        Raises:
            ValueError: It cannot be made any more.
        """
        if self.name == RAY_DEFAULT:
            made = manager.ray_default()
        else:
            loaded = manager.warmed_up(self._load(manager.scenario))
            made = manager.runner(self.name, loaded, self.explore_fraction)
        made.by_hand, made.aliases = self.by_hand, self.aliases
        made.breaker.restore(self.breaker)
        return made

    def _load(self, scenario: str) -> LoadedPolicy:
        card = self.card
        if self.artifact is None:
            return resolve_policy(card.name, scenario)
        data = base64.b64decode(self.artifact, validate=True)
        artifact = PolicyArtifact.decoded(data, f"{card.name} in the state file")
        known, order = load_scenario(scenario), order_in(card.name)
        name = card.name if order is None else str(RuleName.parse(card.name).ordered(None))
        loaded = from_artifact(name, artifact, card.source, known)
        if order is not None:
            loaded = in_order(loaded, order, known)
        told = loaded.card.model_copy(update={"mlflow_run": card.mlflow_run})
        return LoadedPolicy(told, loaded.make, loaded.predictor, artifact)


class StoredExperiment(FrozenModel):
    """An experiment that goes on."""

    policy: StoredPolicy
    mode: Mode
    share: float
    alpha: float
    started_s: float
    champion: str
    """Label of the policy that it is compared with."""
    evidence: dict[str, Any]

    @classmethod
    def of(cls, experiment: Experiment, champion: PolicyRunner) -> StoredExperiment:
        """Write an experiment down."""
        return cls(
            policy=StoredPolicy.of(experiment.policy), mode=experiment.mode,
            share=experiment.share, alpha=experiment.alpha, started_s=experiment.started_s,
            champion=champion.label, evidence=experiment.saved(),
        )  # fmt: skip


class StoredAlias(FrozenModel):
    """What the registry's aliases have to do with it."""

    uri: str
    model: str
    known: tuple[str, ...]
    is_settled: bool


class StoredEvent(FrozenModel):
    """A change."""

    time_s: float
    what: str
    policy: str
    why: str
    by: str = GATEWAY

    @classmethod
    def of(cls, event: Event) -> StoredEvent:
        """Write a change down."""
        return cls(**asdict(event))


class StoredState(FrozenModel):
    """Everything."""

    format_version: Literal[1] = 1
    configured: Configured
    policy: StoredPolicy
    previous: StoredPolicy | None
    experiment: StoredExperiment | None
    events: tuple[StoredEvent, ...]
    alias: StoredAlias | None
    parts: dict[str, dict[str, Any]]
    """What other parts of the gateway remember, by name."""


class StateFile:
    """The file of one gateway, which writes no more once it has closed it.

    A gateway that takes the place of another takes its file, too. So of two that were given one
    file and go on, the one that came last has it, and the other is told when it writes again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_closed = False
        self._written: tuple[int, ...] | None = None
        """File that this one has put there last; None: it has put none there."""

    def read(self) -> StoredState | None:
        """Read it; None: there is none.

        Raises:
            StateError: It cannot be read, or is of another release.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(_MAX_STATE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(f"state file {self.path}: {error.strerror}") from None
        if len(data) > _MAX_STATE_BYTES:
            raise StateError(f"state file {self.path} is larger than {_MAX_STATE_BYTES} bytes")
        return _parsed(data, self.path)

    def write(self, state: StoredState) -> None:
        """Replace it; once this returns the disk has it.

        Raises:
            OSError: It cannot be written, or another gateway has since; what was there is still
                there.
        """
        if self._written is not None and identity_of(self.path) not in (None, self._written):
            raise OSError(errno.EBUSY, "another gateway writes it too", str(self.path))
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.write(state.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        if not self.is_closed:
            self._written = identity_of(part)
            part.replace(self.path)
            _sync(self.path.parent)

    def set_aside(self) -> None:
        """Keep what cannot be used beside it, for whoever wants to know."""
        self.path.replace(self.path.with_name(f"{self.path.name}.refused"))


@lru_cache(maxsize=4)
def _encoded(artifact: PolicyArtifact) -> str:
    """A policy file in base64; the same few are written again and again."""
    return base64.b64encode(artifact.encoded()).decode()


def _parsed(data: bytes, path: Path) -> StoredState:
    try:
        found = json.loads(data)
        version = found.get("format_version") if isinstance(found, dict) else None
        if version != 1:
            raise StateError(
                f"state file {path} has format version {version}; this release reads 1"
            )
        return StoredState.model_validate(found)
    except StateError:
        raise
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise StateError(f"state file {path}: {field}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise StateError(f"state file {path} is broken: {str(error)[:200]}") from None


def _sync(folder: Path) -> None:
    """Let the disk have a folder's names, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
