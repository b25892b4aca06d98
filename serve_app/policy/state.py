"""What a gateway must not forget when it crashes or is deployed anew: one small JSON file.

Policies stand in it whole, so that neither a file that is gone nor an alias that has moved changes
who decides after a crash. The file is replaced in one step, and is on the disk before a change is
answered.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, ConfigDict, ValidationError

from serve_app.policy.audit_log import Event
from serve_app.policy.card import PolicyCard
from serve_app.policy.champion_alias import Background, InThread, text_of
from serve_app.policy.experiment import Conflict, Mode
from serve_app.policy.loading import LoadedPolicy, reloaded
from serve_app.watched_file import identity_of
from tokenyard.config import FrozenModel
from tokenyard.routing.artifact import PolicyArtifact

logger = logging.getLogger(__name__)

STATE_FILE = "gateway-state.json"
"""Its name beside the decision log."""
_FORMAT_VERSION: Literal[2] = 2
_MAX_STATE_BYTES = 256 << 20
_SAVE_S = 5.0
"""Longest time for which an answer waits for the disk."""
_WATCH_EVERY_S = 1.0
_EVIDENCE_EVERY_S = 5.0
_ALWAYS = ("autopilot", "limits", "outliers", "speeds")
"""Parts whose state holds whichever policy the cluster file names; `speeds:POOL` is of a pool."""


class Remembers(Protocol):
    """A part of the gateway whose state is kept with that of its policies."""

    def saved(self) -> dict[str, Any]:
        """Return what must not be forgotten, as JSON has it."""

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take it up; a ValueError says why it cannot be used."""


@lru_cache(maxsize=4)
def _encoded(artifact: PolicyArtifact) -> str:
    """A policy file in base64; the same few are written again and again."""
    return base64.b64encode(artifact.encoded()).decode()


_Saved = Annotated[
    dict[str, Any], BeforeValidator(lambda part: part.saved() if hasattr(part, "saved") else part)
]
_Encoded = Annotated[
    str, BeforeValidator(lambda file: _encoded(file) if isinstance(file, PolicyArtifact) else file)
]


class _State(FrozenModel):
    """Is made from the attributes of what it is the state of."""

    model_config = ConfigDict(from_attributes=True)


class Configured(FrozenModel):
    """What the cluster file says; another cluster file's policy counts before the state."""

    policy: str
    scenario: str


class LoadedState(_State):
    """A `LoadedPolicy`."""

    card: PolicyCard
    artifact: _Encoded | None
    """None: it is a rule."""

    def load(self, scenario: str) -> LoadedPolicy:
        """Make the policy again; a ValueError says that it cannot be made any more."""
        artifact = None
        if self.artifact is not None:
            data = base64.b64decode(self.artifact, validate=True)
            artifact = PolicyArtifact.decoded(data, f"{self.card.name} in the state file")
        return reloaded(self.card, artifact, scenario)


class PolicyState(_State):
    """A `PolicyRunner`."""

    name: str
    label: str
    loaded: LoadedState
    explore_fraction: float
    by_hand: bool
    aliases: dict[str, str] | None
    breaker: _Saved


class ExperimentState(_State):
    """An `Experiment` that goes on."""

    champion: str
    policy: PolicyState
    mode: Mode
    share: float
    alpha: float
    started_s: float
    evidence: dict[str, Any]


class AliasState(_State):
    """A `ChampionAlias`."""

    uri: str
    model: str
    known: frozenset[str]
    is_settled: bool


class GatewayState(FrozenModel):
    """Everything."""

    format_version: Literal[2] = _FORMAT_VERSION
    configured: Configured
    policy: PolicyState
    previous: PolicyState | None
    experiment: ExperimentState | None
    events: tuple[Event, ...]
    alias: AliasState | None
    parts: dict[str, _Saved]
    """Other parts of the gateway, by name."""


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

    def read(self) -> GatewayState | None:
        """Read it; None: there is none. A ValueError names it and says why it cannot be used."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_MAX_STATE_BYTES + 1)
            if len(data) > _MAX_STATE_BYTES:
                raise ValueError(f"it is larger than {_MAX_STATE_BYTES} bytes")
            fields = json.loads(data)
            version = fields.get("format_version") if isinstance(fields, dict) else None
            if version == _FORMAT_VERSION:
                return GatewayState.model_validate(fields)
            reason = f" has format version {version}; this release reads {_FORMAT_VERSION}"
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = f": {error.strerror}"
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            reason = f": {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        except (ValueError, RecursionError) as error:
            reason = f" is broken: {str(error)[:200]}"
        raise ValueError(f"state file {self.path}{reason}")

    def write(self, state: GatewayState) -> None:
        """Replace it, or raise an OSError and change nothing; once this returns the disk has it."""
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
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # The disk has its names, too.
            finally:
                os.close(folder)


class StateStore:
    """Writes the state down: before a change is answered, and every few seconds for evidence.

    Without a file nothing is written.
    """

    def __init__(
        self,
        file: StateFile | None,
        parts: Mapping[str, Remembers],
        snapshot: Callable[[], GatewayState],
        in_thread: InThread,
    ) -> None:
        self.file, self.parts = file, parts
        self.is_due = False
        """Whether something has changed that is not written."""
        self._snapshot, self._in_thread = snapshot, in_thread
        self.read_note: str | None = None
        """Why what an earlier gateway wrote was not taken up."""
        self._save_note: str | None = None
        self._saved_s = 0.0
        self._saving, self._background = asyncio.Lock(), Background()
        self._has_ended = False

    @property
    def note(self) -> str | None:
        """Why the state could not be read or written; None: it could, or there is no file."""
        return self._save_note or self.read_note

    def read(self) -> GatewayState | None:
        """Return what an earlier gateway wrote; None: nothing that can be used."""
        try:
            return None if self.file is None else self.file.read()
        except ValueError as error:
            self.refuse(str(error))
            return None

    def refuse(self, reason: str) -> None:
        """Set the file aside: a gateway that does not start is worse than one that forgets."""
        assert self.file is not None
        path = self.file.path
        try:
            path.replace(refused := path.with_name(f"{path.name}.refused"))
            outcome = f"it is kept as {refused}"
        except OSError as error:
            outcome = f"it cannot be set aside: {error.strerror}"
        self.read_note = reason
        logger.error("%s; %s", reason, outcome)

    def lack(self, reason: str) -> None:
        """Note what of the state was not taken up."""
        self.read_note = reason
        logger.error("%s", reason)

    def restore_parts(self, state: GatewayState, always: bool) -> None:
        """Let the parts that hold `always`, or the others, take up what was written."""
        for name, part in self.parts.items():
            if name in state.parts and (name.partition(":")[0] in _ALWAYS) == always:
                try:
                    part.restore(state.parts[name])
                except (ValueError, KeyError, TypeError) as error:
                    self.lack(f"{name} is not as it was: {text_of(error)}")

    def start(self) -> None:
        """Begin to write down what happens by itself: a canary that ends, and evidence."""
        self._background.run(self._watch())

    async def stop(self) -> None:
        """Write the state a last time: from now on the file is another gateway's."""
        self._has_ended = True
        await self.save_in_time()
        if self.file is not None:
            self.file.is_closed = True
        self._background.stop()

    def check_goes_on(self) -> None:
        """Refuse a change that the next gateway would not hear of.

        Raises:
            Conflict: The gateway ends.
        """
        if self._has_ended:
            raise Conflict("the gateway is about to end; ask again, and the next one answers")

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Have something changed that is remembered: at the end of the context it is written.

        Raises:
            Conflict: The gateway ends.
        """
        self.check_goes_on()
        yield
        await self.save_in_time()

    async def save_in_time(self) -> None:
        """Wait until the disk has the state, though not for ever."""
        if self.file is None:
            return
        done, _ = await asyncio.wait([self._background.run(self.save())], timeout=_SAVE_S)
        if not done:
            self._save_note = f"the state was not written within {_SAVE_S:g} s"

    async def save(self) -> None:
        """Write the state down, after whoever does so already."""
        if self.file is None:
            return
        async with self._saving:
            self.is_due, state = False, self._snapshot()
            try:
                await self._in_thread(self.file.write, state)
            except OSError as error:
                note = f"the state cannot be written: {error}"
                if note != self._save_note:
                    logger.error("%s", note)
                self._save_note, self.is_due = note, True
            else:
                self._saved_s, self._save_note = time.monotonic(), None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if self.is_due or time.monotonic() - self._saved_s > _EVIDENCE_EVERY_S:
                await self.save()
