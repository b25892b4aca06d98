"""Moves the registry's aliases to the policy that decides, and back, in order.

An alias and a policy cannot change in one step: the registry is another program, which may be slow,
fail, or do what it was asked after nobody waits any more. So what the aliases should be is a
property of the policy that decides, and is written down before anything moves. Whatever happens
then, the aliases are brought to that, also by the next gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from tokenyard import registry
from tokenyard.artifact import RegistryError
from tokenyard.registry import CHAMPION
from tokenyard.routing.artifact import PolicyArtifact

logger = logging.getLogger(__name__)

Aliases = Mapping[str, str]
"""Versions of a registered model by alias."""
InThread = Callable[..., Awaitable[Any]]
"""Calls a function in a thread, as `asyncio.to_thread`."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_REGISTRY_S = 30.0
"""Longest time for which an answer waits for the registry."""


class PromotionDropped(RuntimeError):
    """A promotion was cancelled before the registry answered."""


class Background:
    """Keeps background tasks alive."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def stop(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever still waits is told; else nobody need be.


class ChampionAlias:
    """Writes the aliases of one registered model, one write at a time."""

    def __init__(
        self,
        uri: str,
        model: str,
        wanted: Callable[[], Aliases | None],
        save: Callable[[], Awaitable[None]],
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        """Write nothing yet.

        `wanted` returns the champion's aliases; None: as they are. `save` writes down all that must
        not be forgotten. `in_thread` calls functions of the registry, which block.
        """
        self.uri, self.model = uri, model
        self.known: set[str] = set()
        """Versions that were champion with our knowledge."""
        self.is_settled = True
        """Whether the registry has, as far as is known, what is wanted."""
        self.note: str | None = None
        """The last aliases written, or why they could not be."""
        self._wanted, self._save, self._in_thread = wanted, save, in_thread
        self._writing, self._background = asyncio.Lock(), Background()
        self._following: asyncio.Task[None] | None = None

    def resume(self, versions: Collection[str], is_settled: bool, wanted: Aliases | None) -> None:
        """Go on where an earlier gateway was, and write what it has not; blocks."""
        self.known, self.is_settled = set(versions), is_settled
        if is_settled or wanted is None:
            return
        try:
            registry.settle(self.uri, self.model, wanted, self.known)
            self.is_settled = True
        except RegistryError as error:
            self._note_failure(error)

    def follow(self) -> None:
        """Bring the aliases to what is wanted now, in the background, until that has worked."""
        if self._wanted() is None:
            return
        self.is_settled = False
        if self._following is None or self._following.done():
            self._following = self._background.run(self._follow())

    def stop(self) -> None:
        """Give up; what is not settled is for the next gateway."""
        self._background.stop()

    async def promote(
        self,
        artifact: PolicyArtifact,
        tags: Mapping[str, str],
        begin: Callable[[Aliases], bool],
        finish: Callable[[Aliases], bool],
    ) -> None:
        """Move the alias to an artifact, and let it decide in the step in which that is known.

        What a thread still writes once nobody waits any more is taken back afterwards. `begin` is
        told the aliases before they move, and says whether the promotion is still wanted. `finish`
        is told them afterwards, and lets the policy decide, unless nobody wants that now.

        Raises:
            PromotionDropped: Nobody wants it any more. The aliases go back to what is wanted.
            RegistryError: The registry cannot be written, does not answer in time, or somebody
                else has promoted meanwhile.
        """
        is_awaited, is_done = True, False

        def finish_if_awaited(after: Aliases) -> bool:
            nonlocal is_done
            is_done = is_awaited and finish(after)
            return is_done

        # Not to be cancelled with the caller: a thread that writes cannot be called back.
        writing = self._background.run(
            self._promote(
                artifact, tags, lambda before: is_awaited and begin(before), finish_if_awaited
            )
        )
        try:
            await asyncio.wait([writing], timeout=_REGISTRY_S)
        finally:
            is_awaited = False  # Also where the caller has left.
        if is_done:
            return
        if not writing.done():
            raise RegistryError("the registry does not answer in time")
        await writing

    async def _promote(
        self,
        artifact: PolicyArtifact,
        tags: Mapping[str, str],
        begin: Callable[[Aliases], bool],
        finish: Callable[[Aliases], bool],
    ) -> None:
        async with self._writing:
            # Aliases that an earlier promotion has left behind are no state to go back to.
            await self._settle()
            version, before = await self._in_thread(
                registry.enter, self.uri, self.model, artifact, tags
            )
            if not begin(before):
                raise PromotionDropped
            self.known |= {version, before.get(CHAMPION, version)}
            self.is_settled, after = False, registry.promoted(before, version)
            try:
                await self._save()
                if not await self._write(after):
                    raise RegistryError("somebody else has promoted another version meanwhile")
                if not finish(after):
                    raise PromotionDropped
                self.is_settled = True
                self.note = f"{self.model} version {version} is champion"
                await self._save()
            except Exception:
                self.follow()
                raise

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self.is_settled:
            try:
                async with self._writing:
                    await self._settle()
            except Exception as error:  # Stores fail in ways of their own.
                self._note_failure(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    def _note_failure(self, error: Exception) -> None:
        self.note = f"the registry is not as it should be: {text_of(error)}"
        logger.error("%s", self.note)

    async def _settle(self) -> None:
        """Write what is wanted until it does not change meanwhile."""
        while not self.is_settled:
            wanted = self._wanted()
            done = wanted is None or await self._write(wanted)
            if self._wanted() != wanted:
                continue
            self.is_settled = True
            self.note = f"{self.model}: {_outcome(wanted, done)}"
            await self._save()

    async def _write(self, aliases: Aliases) -> bool:
        written = await self._in_thread(
            registry.settle, self.uri, self.model, dict(aliases), frozenset(self.known)
        )
        return bool(written)


def _outcome(wanted: Aliases | None, done: bool) -> str:
    if not done:
        return "somebody else has promoted another version"
    version = None if wanted is None else wanted.get(CHAMPION)
    return "no version is champion" if version is None else f"version {version} is champion again"


def text_of(error: BaseException) -> str:
    """What an error says, or at least what it is."""
    return str(error) or type(error).__name__
