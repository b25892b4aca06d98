"""What is believed of a replica's speed: what is declared, published, and seen of its answers."""

from __future__ import annotations

import logging
from typing import Any

from serve_app.cluster import EndpointProfile, EngineProfile, ExternalPool
from tokenyard.perf.online import (
    AnswerMeter,
    BatchLimitEstimator,
    PoolEstimator,
    ReplicaEstimator,
)  # fmt: skip
from tokenyard.routing.fleet import IterationSpeed

logger = logging.getLogger(__name__)

SHARE_EVERY_S = 1.0
"""Time after which endpoints learn from each other again, and policies from them."""
_FAR_OFF = 2.0
"""How many times as fast or slow as declared is worth a warning."""
_MEMORY_IS_FULL = 0.9
"""Share of KV memory from which on requests may wait for memory."""
_OTHERS_WEIGHT = 0.1
"""Weight of the newest comparison with what an endpoint publishes."""
_TIMES = (*IterationSpeed.model_fields,)


class EndpointSpeed:
    """The profile of one endpoint or replica."""

    def __init__(
        self, name: str, pool: str, estimator: ReplicaEstimator, prior: EndpointProfile,
        declared: EngineProfile | None,
    ) -> None:  # fmt: skip
        """Begin with what is declared; None: nothing is, and `prior` stands in."""
        self.meter = AnswerMeter(estimator)
        self.contradiction: str | None = None
        """What the answers say against the declared profile; None: nothing."""
        self._name, self._pool, self._estimator = name, pool, estimator
        self._limit, self._prior, self._declared = BatchLimitEstimator(), prior, declared
        self._sizes: tuple[int | None, float | None] = (None, None)
        self._take(declared or prior.completed(None, None))
        self.profile, self._told = self._known, list[float]()
        self.estimate()  # Others of its pool may be known already.

    @classmethod
    def of_endpoint(cls, url: str, pool: ExternalPool, estimators: PoolEstimator) -> EndpointSpeed:
        """Make that of an endpoint of a pool."""
        prior = pool.prior
        declared = None if pool.profile is None else prior.completed(None, None)
        return cls(url, pool.name, estimators.add(url), prior, declared)

    @classmethod
    def of_replica(
        cls, name: str, pool: str, profile: EngineProfile, estimators: PoolEstimator
    ) -> EndpointSpeed:
        """Make that of a replica that has published what is known of it."""
        prior = EndpointProfile(**profile.model_dump(exclude={"source"}))
        declared = profile if profile.source == "declared" else None
        return cls(name, pool, estimators.add(name), prior, declared)

    def publish(self, max_batch: int | None, kv_capacity_tokens: float | None) -> EngineProfile:
        """Take the sizes that it publishes; return its profile."""
        sizes = max_batch or self._limit.estimate, kv_capacity_tokens
        if sizes != self._sizes:
            self._sizes = sizes
            self._take(self._prior.completed(*sizes))
            self.profile = self._known.model_copy(
                update=self.profile.model_dump(include={*_TIMES, "source"})
            )
        return self.profile

    @property
    def knows_memory(self) -> bool:
        """Whether its KV memory is declared or published."""
        return bool(self._prior.kv_capacity_tokens or self._sizes[1])

    def compare(self, waiting: int, running: int, kv_used: float | None, num_own: int) -> None:
        """Compare what it publishes with the requests of this gateway that it has."""
        if (kv_used or 0.0) < _MEMORY_IS_FULL:
            self._limit.observe(running, waiting)
        if num_own:
            times = max((waiting + running) / num_own, 1.0)
            self.meter.times_own += _OTHERS_WEIGHT * (times - self.meter.times_own)

    def estimate(self) -> dict[str, Any]:
        """Return what has changed in its profile since the last estimate of its speed."""
        if self._declared is not None:
            if not self._estimator.num_observations:
                return {}
            self._judge(self._estimator.slower_than(self._declared.iteration))
        times = self._estimator.shared_iteration.tolist()
        if times == self._told:
            return {}
        self._told = times
        changes = {**dict(zip(_TIMES, times, strict=True)), "source": "estimated"}
        self.profile = self.profile.model_copy(update=changes)
        return changes

    def describe(self) -> dict[str, Any]:
        """Return what is estimated, as `GET /v1/pools` shows it."""
        known = self._estimator.estimate
        return {
            **dict(zip(_TIMES, known.iteration.tolist(), strict=True)),
            "log_deviations": dict(zip(_TIMES, known.deviations.tolist(), strict=True)),
            "residual_fraction": known.residual,
            "num_observations": known.num_observations, "num_changes": known.num_changes,
            "contradiction": self.contradiction,
        }  # fmt: skip

    def _take(self, known: EngineProfile) -> None:
        """Replace all but the times."""
        self._known = known
        self.meter.max_batch, self.meter.token_budget = known.max_batch, known.token_budget

    def _judge(self, ratio: float) -> None:
        """Say so, once, where the declared speed is certainly far off."""
        if 1 / _FAR_OFF < ratio < _FAR_OFF:
            self.contradiction = None
            return
        how, times = ("slower", ratio) if ratio > 1 else ("faster", 1 / ratio)
        text = f"is at least {times:.1f} times {how} than declared"
        if self.contradiction is None:
            logger.warning("pool %s: %s %s", self._pool, self._name, text)
        self.contradiction = text
