"""Is the canary worse? A test that may be looked at after every request.

Requests go to the canary by a hash, so that under the null hypothesis (which policy decided makes
no difference to whether a request is good) a request that turned out bad was the canary's with
exactly the canary's share as its probability, whatever the traffic did meanwhile: bursts, drift and
failing replicas change how many requests are bad, not whose they are. `SequentialTest` bets against
that. Its capital is a test martingale, and the chance that it ever exceeds `1 / alpha` is at most
`alpha` (Ville's inequality; Shafer 2021, "Testing by betting"; Ramdas et al. 2023,
arXiv:2210.01948). A bet against an assignment probability is a sequential randomisation test.

A long answer violates its SLO under any policy, a short one under none, and neither tells much. So
a model of the champion's requests says how likely one of this size is bad, and the bets follow it.
How many tokens were asked for and generated does not depend on whose a request was, so the capital
stays a martingale, however wrong the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_ALPHA = 0.025
_MEMORY = 150.0
"""Requests over which the rate of bad ones is remembered: bursts are short."""
_LEAST_RATE, _MOST_RATE = 1e-3, 0.98
_USUAL_LOGIT = -2.2
"""Of the rate of bad requests before any was seen: one in ten."""
_STEP = 0.7
_FEW = 20
_FAR = 3.0
"""Standard deviations; sizes beyond are taken for as large."""


@dataclass(frozen=True)
class Alternative:
    """A way of being worse that is bet on."""

    odds_ratio: float
    """How many times as likely, in odds, a request of the canary's is to be bad."""
    weight: float
    """Share of the capital that is bet on it."""


ALTERNATIVES = (Alternative(1.5, 0.95), Alternative(1e4, 0.05))
"""Mostly a difference that just matters (a goodput of 0.857 for 0.90), and a little on disasters.
Odds, because where every second request is bad, as in a burst, a worse policy loses more of them
than in a lull."""


@dataclass
class _Size:
    """Sizes of requests of one kind, in standard deviations of their logarithm."""

    num: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def saved(self) -> list[float]:
        """All of it, for `restored`."""
        return [self.num, self.mean, self.squares]

    @classmethod
    def restored(cls, saved: Sequence[float]) -> _Size:
        num, mean, squares = saved
        return cls(int(num), mean, squares)

    def scaled(self, tokens: int | None) -> float:
        """Return how far it is from the mean of those seen; 0 where it or they are not known."""
        if tokens is None or self.num < _FEW:
            return 0.0
        deviation = max(math.sqrt(self.squares / self.num), 1e-3)
        return min(max((math.log1p(tokens) - self.mean) / deviation, -_FAR), _FAR)

    def add(self, tokens: int | None) -> None:
        """Count one more (Welford's update)."""
        if tokens is None:
            return
        self.num += 1
        away = math.log1p(tokens) - self.mean
        self.mean += away / self.num
        self.squares += away * (math.log1p(tokens) - self.mean)


class _ViolationRate:
    """How likely a request of the champion's is bad: logistic regression, one step a request.

    Features are the violation rate and the sizes with their squares; steps are AdaGrad's (Duchi et
    al. 2011).
    """

    def __init__(self) -> None:
        self._bad, self._seen = 1.0, 10.0
        self._prompt, self._output = _Size(), _Size()
        self._weights = [_USUAL_LOGIT, *[0.0] * 5]
        self._squares = [1.0] * 6

    def saved(self) -> dict[str, list[float]]:
        """All of it, for `restore`."""
        return {
            "bad_seen": [self._bad, self._seen], "prompt": self._prompt.saved(),
            "output": self._output.saved(), "weights": list(self._weights),
            "squares": list(self._squares),
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Sequence[float]]) -> None:
        self._bad, self._seen = saved["bad_seen"]
        self._prompt = _Size.restored(saved["prompt"])
        self._output = _Size.restored(saved["output"])
        for mine, name in ((self._weights, "weights"), (self._squares, "squares")):
            if len(saved[name]) != len(mine):
                raise ValueError(f"{name} of the violation rate must be {len(mine)} numbers")
            mine[:] = saved[name]

    def features(self, prompt_tokens: int | None, output_tokens: int | None) -> list[float]:
        rate = min(max(self._bad / self._seen, _LEAST_RATE), _MOST_RATE)
        recent = math.log(rate / (1.0 - rate)) - _USUAL_LOGIT
        prompt, output = self._prompt.scaled(prompt_tokens), self._output.scaled(output_tokens)
        return [1.0, recent, output, output * output - 1.0, prompt, prompt * prompt - 1.0]

    def predict(self, features: Sequence[float]) -> float:
        logit = sum(w * x for w, x in zip(self._weights, features, strict=True))
        return min(
            max(1.0 / (1.0 + math.exp(-min(max(logit, -7.0), 4.0))), _LEAST_RATE), _MOST_RATE
        )

    def see(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """Learn what sizes there are."""
        self._prompt.add(prompt_tokens)
        self._output.add(output_tokens)

    def learn(self, features: Sequence[float], good: bool) -> None:
        """Learn what became of one of the champion's."""
        error = (not good) - self.predict(features)
        for i, feature in enumerate(features):
            slope = error * feature
            self._squares[i] += slope * slope
            self._weights[i] += _STEP * slope / math.sqrt(self._squares[i])
        fade = 1.0 - 1.0 / _MEMORY
        self._bad, self._seen = fade * self._bad + (not good), fade * self._seen + 1.0


@dataclass
class SequentialTest:
    """Counts who was good, and says when the canary is worse than what it is compared to."""

    share: float
    """Probability with which a request is the canary's, in (0, 1)."""
    alpha: float = DEFAULT_ALPHA
    """Chance, at most, to stop a canary under which everything would have gone the same."""
    alternatives: Sequence[Alternative] = ALTERNATIVES
    num_canary: int = 0
    num_champion: int = 0
    canary_good: int = 0
    champion_good: int = 0
    _log_capital: list[float] = field(default_factory=list)
    _violation_rate: _ViolationRate = field(default_factory=_ViolationRate)

    def __post_init__(self) -> None:
        """Split the capital.

        Raises:
            ValueError: A share or `alpha` is not inside (0, 1).
        """
        for name, value in (("share", self.share), ("alpha", self.alpha)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name} {value} must lie inside (0, 1)")
        total = sum(alternative.weight for alternative in self.alternatives)
        self._log_capital = [
            math.log(alternative.weight / total) for alternative in self.alternatives
        ]

    def saved(self) -> dict[str, Any]:
        """The evidence so far, as JSON has it."""
        return {
            "counts": [self.num_canary, self.num_champion, self.canary_good, self.champion_good],
            "log_capital": list(self._log_capital),
            "violation_rate": self._violation_rate.saved(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take up the evidence of a test with the same share and alternatives.

        Raises:
            ValueError: It is not such evidence.
        """
        counts, capital = map(int, saved["counts"]), list(map(float, saved["log_capital"]))
        if len(capital) != len(self.alternatives):
            raise ValueError(f"log_capital must be {len(self.alternatives)} numbers")
        self.num_canary, self.num_champion, self.canary_good, self.champion_good = counts
        self._log_capital = capital
        self._violation_rate.restore(saved["violation_rate"])

    @property
    def log_capital(self) -> float:
        """Natural logarithm of the capital; it begins at 0."""
        top = max(self._log_capital)
        return top + math.log(sum(math.exp(log_stake - top) for log_stake in self._log_capital))

    @property
    def stops_at(self) -> float:
        """Logarithm of the capital from which on the canary counts as worse."""
        return -math.log(self.alpha)

    @property
    def is_rejected(self) -> bool:
        """Whether the capital exceeds 1 / alpha now."""
        return self.log_capital >= self.stops_at

    def record(
        self,
        canary: bool,
        good: bool,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> bool:
        """Take the next request that is settled; return whether the canary is worse.

        Args:
            canary: Whose request it was.
            good: Whether it attained its SLOs.
            prompt_tokens: Its prompt; None: not known.
            output_tokens: The answer, which must not depend on whose it was; None: not known.
        """
        # Bets are placed on what was known before this request.
        features = self._violation_rate.features(prompt_tokens, output_tokens)
        bad_rate = self._violation_rate.predict(features)
        for index, alternative in enumerate(self.alternatives):
            self._log_capital[index] += self._gain(alternative, bad_rate, canary, good)
        if canary:
            self.num_canary += 1
            self.canary_good += good
        else:
            self.num_champion += 1
            self.champion_good += good
            self._violation_rate.learn(features, good)
        self._violation_rate.see(prompt_tokens, output_tokens)
        return self.is_rejected

    def _gain(self, alternative: Alternative, bad_rate: float, canary: bool, good: bool) -> float:
        """Logarithm of how the stake multiplies: Pr(whose | outcome) over Pr(whose)."""
        odds = alternative.odds_ratio * bad_rate / (1.0 - bad_rate)
        worse = min(odds / (1.0 + odds), 0.999)
        theirs, ours = (1.0 - bad_rate, 1.0 - worse) if good else (bad_rate, worse)
        mixed = self.share * ours + (1.0 - self.share) * theirs
        return math.log((ours if canary else theirs) / mixed)
