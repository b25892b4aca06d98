"""How long answers will be, learned from those that have come.

The output length is estimated for groups of requests within groups: all of them, those of one
prompt size, and, on a second path, those of one model, route and `max_tokens`, of these those of a
tenant, and of these those of one prompt size. A group's estimate is pulled towards that of the
group around it, the more the fewer answers it has seen. Nobody knows in advance which group tells
most, nor how quickly traffic changes. So the estimates of all groups that a request is in, each
with a short and a long memory, are mixed by how well they have predicted lately: a Bayesian
mixture with forgetting, in which groups that do not exist yet abstain (Freund et al. 1997).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from tokenyard.types import FloatArray

_BINS_PER_OCTAVE = 2
_NUM_BINS = 20 * _BINS_PER_OCTAVE
"""Bins of the histograms, from one token to a million."""
_HALF_LIVES = (40.0, 2000.0)
"""Answers of a group after which one counts half, of the short and the long memory."""
_OUTER_COUNTS = 6.0
"""Answers that the estimate of the group around is worth."""
_PRIOR_COUNTS = 20.0
"""Answers that the prediction from outside is worth."""
_FORGETTING = 0.99
"""Factor on the log weights of the mixture at every answer."""
_MOST_GROUPS = 4096
"""Groups that are kept; the one that was not used for longest goes first."""
_FEWEST_ANSWERS = 30
"""Before them the prediction from outside counts."""
_SCORE_HALF_LIFE_S = 1800.0
"""Time after which a prediction counts half when the two are compared."""
_LARGEST_UNIT = 1e100


class AnswerFeatures(NamedTuple):
    """What is known of a request before it is answered."""

    prompt_tokens: float
    max_tokens: float = 0.0
    """Longest answer that is asked for; 0: none is given."""
    model: str = ""
    route: bytes = b""
    tenant: str = ""

    @property
    def groups(self) -> tuple[tuple[Hashable, ...], ...]:
        """Keys of the groups that it is in, from the outer to the inner one, on both paths."""
        octaves = math.log2(max(self.prompt_tokens, 1.0))
        limit = int(2.0 * math.log2(self.max_tokens)) if self.max_tokens >= 1.0 else -1
        by_limit = (self.model, self.route, limit)
        by_tenant = (by_limit, self.tenant)
        return (
            (int(octaves), ("fine", int(8.0 * octaves))),
            (by_limit, by_tenant, (by_tenant, int(octaves))),
        )


@dataclass(slots=True)
class _Memory:
    """Discounted counts of answers. New ones weigh more, which spares shrinking the old ones."""

    growth: float
    unit: float = 1.0
    """Weight of the next answer."""
    weight: float = 0.0
    tokens: float = 0.0
    """Sum of the lengths."""
    histogram: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)

    def add(self, tokens: float, length_bin: int) -> None:
        self.weight += self.unit
        self.tokens += self.unit * tokens
        self.histogram[length_bin] += self.unit
        self.unit *= self.growth
        if self.unit > _LARGEST_UNIT:
            self.weight, self.tokens = self.weight / self.unit, self.tokens / self.unit
            self.histogram = [count / self.unit for count in self.histogram]
            self.unit = 1.0


_Group = tuple[_Memory, ...]
_Estimates = list[tuple[tuple[int, int, int], Any]]
"""Of every group and memory: its place, and what it estimates."""


class AnswerLengths:
    """Predicts the lengths of answers, and learns from each that ends.

    `prior_tokens` is the mean that is expected without any of this; estimates begin there.
    """

    def __init__(self) -> None:
        self.num_answers = 0
        self.mean_lengths_tokens = (0.0, 0.0)
        """Mean prompt and answer, recent ones counting most."""
        self._all = _new_group()
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._log_weights: dict[tuple[int, int, int], float] = {}
        self._weights: dict[tuple[int, int, int], float] = {}
        self._deviances = [0.0, 0.0]
        """Discounted sums of the gamma deviance, which is least at the true mean: of the prior, and
        of the mixture."""
        self._scored_s = -math.inf

    @property
    def is_better(self) -> bool:
        """Whether it has predicted better than the prior lately, by about the last hour."""
        prior, own = self._deviances
        return self.num_answers >= _FEWEST_ANSWERS and own <= prior

    def expected_tokens(self, features: AnswerFeatures, prior_tokens: float) -> float:
        """Mean length of the answer, tokens: the prior where that has predicted better."""
        return self.mean_tokens(features, prior_tokens) if self.is_better else prior_tokens

    def mean_tokens(self, features: AnswerFeatures, prior_tokens: float) -> float:
        """Mean length of the answer, tokens."""
        return float(self._mixed(self._estimates(features, prior_tokens, attrgetter("tokens"))))

    def quantiles_tokens(
        self, levels: Sequence[float], features: AnswerFeatures | None = None,
        prior_tokens: float = 1.0,
    ) -> FloatArray:  # fmt: skip
        """Quantiles of the answer's length at levels in [0, 1], tokens, shape (num_levels,).

        Without features those of all answers.
        """
        shares: FloatArray = np.array(self._all[-1].histogram)
        if features is not None:
            prior = np.array([_prior_share(i, prior_tokens) for i in range(_NUM_BINS)])
            shares = self._mixed(
                self._estimates(features, prior, lambda memory: np.array(memory.histogram))
            )
        cumulative = np.append(0.0, np.cumsum(shares))
        edges = 2.0 ** (np.arange(_NUM_BINS + 1) / _BINS_PER_OCTAVE)
        quantiles: FloatArray = np.interp(np.asarray(levels) * cumulative[-1], cumulative, edges)
        return quantiles

    def observe(
        self, features: AnswerFeatures, tokens: float, prior_tokens: float, now_s: float
    ) -> None:
        """Learn from an answer of so many tokens that has come to its end.

        `now_s` is the time, seconds on any clock that does not go back.
        """
        tokens = max(tokens, 1.0)
        kept = 0.5 ** (max(now_s - self._scored_s, 0.0) / _SCORE_HALF_LIFE_S)
        self._scored_s = now_s
        for number, mean in enumerate((prior_tokens, self.mean_tokens(features, prior_tokens))):
            ratio = tokens / max(mean, 1.0)
            self._deviances[number] = kept * self._deviances[number] + ratio - 1 - math.log(ratio)
        length_bin = min(int(_BINS_PER_OCTAVE * math.log2(tokens)), _NUM_BINS - 1)
        paths = [self._path(keys) for keys in features.groups]
        prior = _prior_share(length_bin, prior_tokens)
        shares = self._estimates(features, prior, lambda memory: memory.histogram[length_bin])
        mixed = math.log(self._mixed(shares))
        for place, share in shares:
            old = self._log_weights.get(place, 0.0)
            self._log_weights[place] = _FORGETTING * old + math.log(share) - mixed
        largest = max(self._log_weights.values())
        self._weights = {k: math.exp(v - largest) for k, v in self._log_weights.items()}
        for group in (self._all, *paths[0], *paths[1]):
            for memory in group:
                memory.add(tokens, length_bin)
        self.num_answers += 1
        share = 1.0 / min(self.num_answers, _HALF_LIVES[-1])
        prompt, answer = self.mean_lengths_tokens
        self.mean_lengths_tokens = (
            prompt + share * (features.prompt_tokens - prompt), answer + share * (tokens - answer)
        )  # fmt: skip

    def _path(self, keys: Sequence[Hashable]) -> list[_Group]:
        """Groups of these keys, made where there are none."""
        path = []
        for key in keys:
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _new_group()
                if len(self._groups) > _MOST_GROUPS:
                    self._groups.popitem(last=False)
            else:
                self._groups.move_to_end(key)
            path.append(group)
        return path

    def _estimates(
        self, features: AnswerFeatures, prior: Any, sums: Callable[[_Memory], Any]
    ) -> _Estimates:
        """What every group and memory makes of discounted sums and of the group around it."""
        estimates: _Estimates = []
        for number, keys in enumerate(features.groups):
            path = [self._all]
            for key in keys:
                if (group := self._groups.get(key)) is None:
                    break
                path.append(group)
            for memory_number in range(len(_HALF_LIVES)):
                estimate, counts = prior, _PRIOR_COUNTS
                for depth, group in enumerate(path):
                    memory = group[memory_number]
                    pull = counts * memory.unit
                    estimate = (sums(memory) + pull * estimate) / (memory.weight + pull)
                    counts = _OUTER_COUNTS
                    if depth or not number:  # The group of all is on both paths.
                        estimates.append(((number, memory_number, depth), estimate))
        return estimates

    def _mixed(self, estimates: _Estimates) -> Any:
        total: float = 0.0
        mixed: Any = 0.0
        for place, estimate in estimates:
            weight = self._weights.get(place, 1.0)
            total += weight
            mixed = mixed + weight * estimate
        return mixed / total


def _new_group() -> _Group:
    return tuple(_Memory(2.0 ** (1.0 / half_life)) for half_life in _HALF_LIVES)


def _prior_share(length_bin: int, prior_tokens: float) -> float:
    """Share of a bin before any answer: a bell over octaves, two wide, round the prior."""
    octaves = (length_bin + 0.5) / _BINS_PER_OCTAVE - math.log2(max(prior_tokens, 1.0))
    density = math.exp(-(octaves**2) / 8.0) / math.sqrt(8.0 * math.pi)
    return density / _BINS_PER_OCTAVE + 1e-6
