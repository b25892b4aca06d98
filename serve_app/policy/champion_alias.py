"""The registry's aliases follow the policy that decides: they are moved, and moved back, in order.

An alias and a policy cannot change in one step: the registry is another program, which may be slow,
fail, or do what it was asked after nobody waits any more. So what the aliases should be is a
property of the policy that decides, and is written down before anything moves. Whatever happens
then, the aliases are brought to that, also by the next gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
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


class PromotionDropped(RuntimeError):
    """A promotion that nobody wants any more once the registry has answered."""


class ChampionAlias:
    """Writes the aliases of one registered model; one write at a time."""

    def __init__(
        self,
        uri: str,
        model: str,
        wanted: Callable[[], Aliases | None],
        save: Callable[[], Awaitable[None]],
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        """Write nothing yet.

        Args:
            uri: Of the registry.
            model: Registered model.
            wanted: Aliases that the policy that decides should have; None: as they are.
            save: Writes down all that must not be forgotten.
            in_thread: Calls functions of the registry, which block.
        """
        self.uri, self.model = uri, model
        self.known: set[str] = set()
        """Versions that were champion with our knowledge."""
        self.is_settled = True
        """Whether the registry has, as far as is known, what is wanted."""
        self.note: str | None = None
        """What was written last, or why it could not be."""
        self._wanted, self._save, self._in_thread = wanted, save, in_thread
        self._writing = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Bring the aliases to what is wanted now, in the background, until that has worked."""
        if self._wanted() is None:
            return
        self.is_settled = False
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())

    def stop(self) -> None:
        """Give up; what is not settled is for the next gateway."""
        if self._following is not None:
            self._following.cancel()

    async def promote(
        self,
        artifact: PolicyArtifact,
        tags: Mapping[str, str],
        begin: Callable[[Aliases], bool],
        finish: Callable[[Aliases], bool],
    ) -> None:
        """Move the alias to an artifact, and let it decide in the step in which that is known.

        Must not be cancelled: a thread that writes cannot be called back.

        Args:
            artifact: Of the new champion.
            tags: Written onto its version.
            begin: Told the aliases before they move; whether the promotion is still wanted.
            finish: Told them afterwards; lets the policy decide, unless nobody wants that now.

        Raises:
            PromotionDropped: Nobody wants it any more. The aliases go back to what is wanted.
            RegistryError: The registry cannot be written, or somebody else has promoted meanwhile.
        """
        async with self._writing:
            # Aliases that an earlier promotion has left behind are no state to go back to.
            await self._settle()
            version, before = await self._in_thread(
                registry.enter, self.uri, self.model, artifact, tags
            )
            if not begin(before):
                raise PromotionDropped
            self.known |= {version, before.get(CHAMPION, version)}
            self.is_settled = False
            try:
                await self._move(version, registry.promoted(before, version), finish)
            except Exception:
                self.follow()
                raise

    async def _move(self, version: str, after: Aliases, finish: Callable[[Aliases], bool]) -> None:
        await self._save()
        if not await self._write(after):
            raise RegistryError("somebody else has promoted another version meanwhile")
        if not finish(after):
            raise PromotionDropped
        self.is_settled = True
        self.note = f"{self.model} version {version} is champion"
        await self._save()

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self.is_settled:
            try:
                async with self._writing:
                    await self._settle()
            except Exception as error:  # Stores fail in ways of their own.
                self.note = f"the registry is not as it should be: {text_of(error)}"
                logger.error("%s", self.note)
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

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
