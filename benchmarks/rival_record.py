"""Traffic for parity with rivals, and what is written down of each of their decisions."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", dtype=np.uint8)
PHASE_PICKS = 250
"""Decisions until the load and the engines' speeds change."""
LEVELS = (2, 12, 40, 160)
"""Requests in flight that a phase keeps to."""
SPEEDS = (1.0, 1.0, 0.3, 0.05)
"""Weights by which the engine is drawn whose request finishes next, shuffled at each phase."""

WAITING_TOKENS = (3000, 500, 9000, 1000)
"""Queued tokens that each engine reports: they stand still, so that only picks change the state."""
TOKENS_PER_S = (2000.0, 1500.0, 1000.0, 500.0)
"""Tokens per second that each engine reports."""


class Served(Protocol):
    """An engine, as far as traffic needs it."""

    num_polls: int


class Fleet(Protocol):
    """Engines behind a router."""

    @property
    def engines(self) -> Sequence[Served]:
        """All of them."""

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests in flight at each engine."""

    async def send(self, prompt: str) -> int:
        """Have a prompt routed; return the index of the engine."""

    async def finish(self, engine: int, place: int) -> None:
        """Finish the request at this place of those in flight at an engine."""

    async def drain(self) -> None:
        """Finish all that is in flight."""

    async def answer_polls(self) -> None:
        """Tell the router the load if it has asked."""


@dataclass(frozen=True)
class Pick:
    """One decision of a router, and what there was to be known before it."""

    num_chars: int
    in_flight: tuple[int, ...]
    """Requests in flight per engine."""
    matches: tuple[int, ...]
    """Leading characters of the prompt that the router has sent to each engine before."""
    first_sent: int
    """Of engines with the longest match, the one that was sent it first; -1 without a match."""
    num_polls: tuple[int, ...]
    """Times so far that the router has asked each engine for its load."""
    chosen: int


class Prompts:
    """A seeded mix: families of shared prefixes, repeats, continuations, and new ones."""

    def __init__(self, rng: np.random.Generator, num_families: int = 12) -> None:
        """Draw the prefixes: of each family one of 16 to 1,024 characters, and three branches."""
        self._rng = rng
        self._prefixes: list[str] = []
        self._sent: list[str] = []
        for _ in range(num_families):
            trunk = self._text(int(2 ** rng.uniform(4, 10)))
            self._prefixes.append(trunk)
            self._prefixes += [trunk + self._text(int(2 ** rng.uniform(4, 9))) for _ in range(3)]

    def draw(self) -> str:
        """The next prompt."""
        kind = self._rng.random() if self._sent else 1.0
        if kind < 0.15:
            prompt = self._sent[int(self._rng.integers(len(self._sent)))]
        elif kind < 0.35:
            recent = self._sent[-60:]
            prompt = recent[int(self._rng.integers(len(recent)))] + self.new()
        elif kind < 0.85:
            prompt = self._prefixes[int(self._rng.integers(len(self._prefixes)))] + self.new()
        else:
            prompt = self.new()
        # Continuations of continuations would grow without end.
        self._sent.append(prompt[:4096])
        return self._sent[-1]

    def new(self) -> str:
        """A prompt that shares nothing but by chance."""
        return self._text(int(2 ** self._rng.uniform(4, 9)))

    def _text(self, num_chars: int) -> str:
        return self._rng.choice(ALPHABET, num_chars).tobytes().decode()


def common_chars(one: str, other: str) -> int:
    """Characters that two texts have in common from the start."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[:middle] == other[:middle] else (least, middle - 1)
    return least


class SentPrompts:
    """What was sent to one engine, and the longest prefix of a prompt that is among it."""

    def __init__(self) -> None:
        self._sorted: list[str] = []

    @property
    def num_sent(self) -> int:
        """Prompts so far."""
        return len(self._sorted)

    def add(self, prompt: str) -> None:
        """Keep a prompt."""
        bisect.insort(self._sorted, prompt)

    def match(self, prompt: str) -> int:
        """Characters of the longest common prefix: a neighbour in the order has it."""
        place = bisect.bisect(self._sorted, prompt)
        beside = self._sorted[max(0, place - 1) : place + 1]
        return max((common_chars(prompt, other) for other in beside), default=0)


class FirstSent:
    """Which engine was sent each prefix first."""

    def __init__(self) -> None:
        self._sorted: list[tuple[str, int, int]] = []

    def add(self, prompt: str, engine: int) -> None:
        """Keep where a prompt went."""
        bisect.insort(self._sorted, (prompt, len(self._sorted), engine))

    def of(self, prefix: str) -> int:
        """The engine that was sent the prefix first; -1 if none was."""
        begin = bisect.bisect(self._sorted, (prefix,))
        end = bisect.bisect(self._sorted, (prefix + "\x7f",))
        return min((one[1:] for one in self._sorted[begin:end]), default=(0, -1))[1]


class Script:
    """Seeded: which requests finish between two decisions, so that load varies and is unequal."""

    def __init__(self, rng: np.random.Generator) -> None:
        """Keep about as many requests in flight as one of `LEVELS`, another in each phase."""
        self._rng = rng
        self._level, self._speeds = 0, np.array(SPEEDS)

    def begin_phase(self) -> None:
        """Draw a level and the engines' speeds."""
        self._level = int(self._rng.choice(LEVELS))
        self._speeds = self._rng.permutation(SPEEDS)

    async def finish_some(self, fleet: Fleet) -> None:
        """Finish requests of drawn engines until there are as many in flight as drawn."""
        most = int(self._rng.integers(self._level // 2, self._level + 1))
        while sum(fleet.in_flight) > most:
            weights = self._speeds[: len(fleet.engines)] * np.array(fleet.in_flight)
            engine = int(self._rng.choice(len(weights), p=weights / weights.sum()))
            await fleet.finish(engine, int(self._rng.integers(fleet.in_flight[engine])))


async def record(fleet: Fleet, num_picks: int, seed: int) -> list[Pick]:
    """Send prompts one after another; return what the router did with each.

    Nothing finishes before every engine has had a request, and the prompts till then share nothing.
    """
    prompts = Prompts(np.random.default_rng((seed, 0)))
    script = Script(np.random.default_rng((seed, 1)))
    sent, first_sent = [SentPrompts() for _ in fleet.engines], FirstSent()
    picks: list[Pick] = []
    for number in range(num_picks):
        if number % PHASE_PICKS == 0:
            script.begin_phase()
        is_begun = all(one.num_sent for one in sent)
        await fleet.answer_polls()
        prompt = prompts.draw() if is_begun else prompts.new()
        matches = tuple(one.match(prompt) for one in sent)
        polls = tuple(engine.num_polls for engine in fleet.engines)
        in_flight = fleet.in_flight
        chosen = await fleet.send(prompt)
        first = first_sent.of(prompt[: max(matches)]) if max(matches) else -1
        picks.append(Pick(len(prompt), in_flight, matches, first, polls, chosen))
        sent[chosen].add(prompt)
        first_sent.add(prompt, chosen)
        if is_begun:
            await script.finish_some(fleet)
    await fleet.drain()
    return picks
