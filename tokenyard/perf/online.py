"""How fast replicas are, estimated from the answers that a router sees pass.

An iteration of an engine takes `iteration_s + prefill_token_s x prompt tokens + sequence_s x
sequences that decode + kv_token_s x cached tokens` (`tokenyard.perf.coefficients`). Over a stretch
of an answer the router knows the time, the iterations (tokens of that answer), and the tokens of
all answers of that replica meanwhile: one equation in the four coefficients.

`ReplicaEstimator` solves them by least squares of the logarithm of the time, in the logarithms of
the coefficients: none can become negative, and an error counts by its share of the time. The latest
equations are linearised anew with every estimate, so that a coefficient that was believed to be
next to nothing can grow; older ones are summed up. Residuals have a bounded influence, old
equations are forgotten, and a cumulative sum of residuals (CUSUM) finds replicas whose speed has
changed. `PoolEstimator` estimates what the
replicas of a pool have in common, from which each of them deviates: the prior of those of which
little has been seen.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenyard.types import FloatArray

GENERIC_ITERATION = np.array([2e-2, 6e-5, 5e-5, 2e-7])
"""Coefficients where nothing is declared, seconds: about those of a 13B model on an A100."""
_LEAST = np.array([1e-5, 1e-8, 1e-8, 1e-11])
"""Declared coefficients count as these at least: a prior of zero could never grow."""
_LOG_LIMITS = math.log(1e-15), math.log(1e3)
_MEMORY = 400
"""Equations after which one counts for 1/e."""
_FIRST_NOISE, _LEAST_NOISE, _MOST_NOISE = 0.3, 0.03, 1.0
"""Deviation of the logarithm of a time from what the coefficients say."""
_FIRST_COUNTS = 10
"""Equations for which the first deviation counts."""
_SPREAD_OF_MEDIAN = 1.4826
"""Standard deviation of normal numbers over the median of their sizes."""
_ABSURD = 1e6
"""How many times as long or short as predicted a time must be to be none."""
_MOST_TOKENS = 1e15
"""Of an equation."""
_BOUND = 2.0
"""Standardised residual beyond which the influence of an equation does not grow."""
_CUSUM_NOISE, _CUSUM_DRIFT, _CUSUM_LIMIT, _CUSUM_MOST = 0.1, 1.0, 10.0, 2.5
_ALIKE, _UNLIKE = 0.05, 0.7
"""Differences of logarithms of times up to which replicas always count as equally fast, and from
which on they do not however little is known."""
_NUM_RECENT = 64
"""Equations that are linearised anew with every estimate."""
_MOST_STEPS = 4
"""Of Gauss and Newton per equation."""
_GRID = 0.02
"""Of logarithms of coefficients that policies are told."""
_TIMES_FULL = 8
"""Times that something must wait while as many run as ever, before that counts as the limit."""
_FEWEST_ITERATIONS, _SHORTEST_S = 8, 0.25
"""Of the stretch of a stream that makes an equation; it is four times as long later on."""
_FIRST_BURST_S, _LONGEST_BURST_S = 1e-3, 0.02
"""In which the tokens of one iteration come, for all its sequences: a quarter of an iteration."""
_MANY = 50
"""Equations after which they come more slowly."""
_WHOLE_EVERY_S = 0.1
"""Least time between two answers that come as a whole and make an equation each."""
_MOST_NOTED = 64
"""Equations that are kept until they are solved; the oldest are dropped."""
_VAGUE = 0.25
"""Weight of an equation that holds times beside those of iterations."""


def _covariance(common: float, individual: float) -> FloatArray:
    """Covariance of logarithms that share a factor and deviate from it, by standard deviations."""
    return common**2 * np.ones((4, 4)) + individual**2 * np.eye(4)


_GENERIC, _DECLARED = _covariance(1.5, 0.8), _covariance(0.7, 0.4)
_REPLICAS = _covariance(0.8, 0.3)
"""Of the deviations of replicas from their pool."""
_CHANGED: FloatArray = np.asarray(np.linalg.inv(_covariance(1.0, 0.2)))
"""Inverse covariance of logarithms once a change was found: it is mostly a common factor."""


@dataclass(frozen=True)
class Estimate:
    """What is known of a replica's speed."""

    iteration: FloatArray
    """Seconds per iteration, prefill token, decoding sequence and KV token, shape (4,)."""
    deviations: FloatArray
    """Standard deviations of their logarithms, shape (4,)."""
    residual: float
    """Spread of the times around what the coefficients say, as a share of them."""
    num_observations: int
    num_changes: int
    """How often its speed has changed abruptly."""


class ReplicaEstimator:
    """The coefficients of one replica; `PoolEstimator.add` makes it."""

    def __init__(self, mean: FloatArray, precision: FloatArray) -> None:
        """Start from a prior of the logarithms: its mean (4,) and the inverse covariance (4, 4)."""
        self.prior, self.prior_vector = precision, precision @ mean
        self.num_observations = self.num_changes = 0
        self.noise = _FIRST_NOISE
        self._recent: FloatArray = np.zeros((_NUM_RECENT, 6))
        """Logarithms of times, batches (four columns) and weights of the latest equations."""
        self._num_since = 0
        """Equations since the speed was last said to have changed."""
        self._summed: tuple[FloatArray, FloatArray] = np.zeros((4, 4)), np.zeros(4)
        """What older ones say of the logarithms: inverse covariance, and that times the mean."""
        self.evidence, self.is_solved = self._summed, True
        """What all of its equations say, and whether the newest are among them."""
        self._up = self._down = 0.0
        self.mean_batch: FloatArray = np.zeros(4)
        """Of the iterations seen: 1, and the tokens and sequences of one iteration."""
        self.believe(mean, np.asarray(np.linalg.inv(precision)))
        self.shared_iteration = _on_grid(self.log)
        """The coefficients, as `PoolEstimator.share` rounds them: equal for replicas that are not
        told apart, seconds, shape (4,)."""

    def believe(self, log: FloatArray, covariance: FloatArray) -> None:
        """Take what all that is known says of the logarithms."""
        self.log, self.covariance = np.clip(log, *_LOG_LIMITS), covariance
        self._iteration: FloatArray = np.exp(self.log)

    @property
    def numbers(self) -> FloatArray:
        """All that its equations say, shape (26,)."""
        self.solve()
        information, vector = self.evidence
        own = vector, self.mean_batch, self.noise, self.num_observations
        return np.hstack([information.ravel(), *own])

    def take_up(self, numbers: FloatArray) -> None:
        """Go on from `numbers`. Half counts: it may be another replica meanwhile."""
        self._begin_anew(numbers[:16].reshape(4, 4) / 2.0, numbers[16:20] / 2.0)
        covariance = np.asarray(np.linalg.inv(self.prior + self._summed[0]))
        self.believe(covariance @ (self.prior_vector + self._summed[1]), covariance)
        self.mean_batch, self.noise = numbers[20:24].copy(), float(numbers[24])
        self.num_observations = int(numbers[25])

    def observe(
        self, time_s: float, iterations: float, prefill_tokens: float,
        decoded_tokens: float, kv_tokens: float, weight: float = 1.0,
    ) -> None:  # fmt: skip
        """Take one equation: so many iterations took that long, with what they computed in all.

        Args:
            time_s: Of all iterations.
            iterations: How many.
            prefill_tokens: Tokens of prompts that were computed.
            decoded_tokens: Tokens that sequences decoded, each with one iteration.
            kv_tokens: Sum over those of the cached tokens that each read.
            weight: How much the equation counts: 1 for an exact one.
        """
        self.solve()
        batch = np.array([iterations, prefill_tokens, decoded_tokens, kv_tokens])
        if not (0 <= batch.min() and 0 < batch.max() < _MOST_TOKENS):
            return
        parts = self._iteration * batch
        predicted_s = float(parts.sum())
        ratio = time_s / predicted_s
        if not 1 / _ABSURD < ratio < _ABSURD:
            return
        shares, residual = parts / predicted_s, math.log(ratio)
        expected = float(shares @ self.covariance @ shares) + self.noise**2 / weight
        if self._has_changed(residual / math.sqrt(expected + _CUSUM_NOISE**2)):
            self.num_changes += 1
            self._begin_anew(_CHANGED, _CHANGED @ self.log)
            self.observe(time_s, iterations, prefill_tokens, decoded_tokens, kv_tokens, weight)
            return
        at = self._num_since % _NUM_RECENT
        if self._num_since >= _NUM_RECENT:
            keep = 1.0 - 1.0 / _MEMORY
            information, vector, _ = self._linearised(self._recent[at : at + 1])
            self._summed = keep * self._summed[0] + information, keep * self._summed[1] + vector
        self._recent[at] = math.log(time_s), *batch, weight
        self._num_since += 1
        self.num_observations += 1
        self.mean_batch += max(1 / self.num_observations, 0.02) * (
            batch / max(iterations, 1.0) - self.mean_batch
        )
        self.is_solved = False  # Solved when it is asked for, or for all replicas at once.

    @property
    def estimate(self) -> Estimate:
        """What is known now."""
        return Estimate(
            self.iteration, np.sqrt(np.diag(self.covariance)), self.noise,
            self.num_observations, self.num_changes,
        )  # fmt: skip

    @property
    def iteration(self) -> FloatArray:
        """The four coefficients, seconds, shape (4,)."""
        self.solve()
        return self._iteration

    def slower_than(self, declared: FloatArray) -> float:
        """How many times as long iterations take as declared, as far as that is certain.

        The mean batch so far is compared, and two standard deviations are left out; 1: they may
        well be as declared; below 1: faster.
        """
        if not self.num_observations:
            return 1.0
        parts = self.iteration * self.mean_batch
        ratio, shares = math.log(parts.sum() / (declared @ self.mean_batch)), parts / parts.sum()
        margin = 2 * math.sqrt(float(shares @ self.covariance @ shares) + self.noise**2)
        return math.exp(math.copysign(max(abs(ratio) - margin, 0.0), ratio))

    def _has_changed(self, standardised: float) -> bool:
        change = min(max(standardised, -_CUSUM_MOST), _CUSUM_MOST)
        self._up = max(self._up + change - _CUSUM_DRIFT, 0.0)
        self._down = max(self._down - change - _CUSUM_DRIFT, 0.0)
        if max(self._up, self._down) < _CUSUM_LIMIT:
            return False
        self._up = self._down = 0.0
        return True

    def _begin_anew(self, information: FloatArray, vector: FloatArray) -> None:
        """Replace all equations by what is known of the logarithms."""
        self._summed, self._num_since = (information, vector), 0
        self.noise, self.is_solved = max(self.noise, _FIRST_NOISE), False

    def _linearised(self, equations: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What some equations say of the logarithms close to what is believed now.

        Returns:
            Inverse covariance (4, 4), that times the mean (4,), and residuals of the equations' own
            weight (num_equations,).
        """
        parts = equations[:, 1:5] * self._iteration
        predicted_s, roots = parts.sum(axis=1), np.sqrt(equations[:, 5])
        shares, residuals = parts / predicted_s[:, None], equations[:, 0] - np.log(predicted_s)
        weighed = np.abs(residuals * roots)
        precisions = (roots / self.noise) ** 2 / np.maximum(weighed / (_BOUND * self.noise), 1.0)
        weighted = (shares * precisions[:, None]).T
        return weighted @ shares, weighted @ (residuals + shares @ self.log), weighed

    def solve(self) -> None:
        """Take account of the equations since the last time."""
        if self.is_solved:
            return
        for _ in range(_MOST_STEPS):
            information, vector, residuals = self._linearised(self._recent[: self._num_since])
            information, vector = self._summed[0] + information, self._summed[1] + vector
            covariance = np.asarray(np.linalg.inv(self.prior + information))
            step = covariance @ (self.prior_vector + vector) - self.log
            longest = float(np.abs(step).max())
            self.believe(self.log + step / max(longest, 1.0), covariance)
            self.evidence, self.is_solved = (information, vector), longest < _GRID / 2
            if self.is_solved:
                break
        if num := len(residuals):
            spread = _SPREAD_OF_MEDIAN * float(np.sort(residuals)[num // 2])
            count, first = self._num_since, _FIRST_NOISE * _FIRST_COUNTS
            noise = (count * spread + first) / (count + _FIRST_COUNTS)
            self.noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)


class PoolEstimator:
    """The replicas of a pool, and what they have in common."""

    def __init__(self, declared: FloatArray | None = None) -> None:
        """Start from declared coefficients, shape (4,), or from a weak generic prior."""
        center = GENERIC_ITERATION if declared is None else np.maximum(declared, _LEAST)
        self._precision: FloatArray = np.asarray(
            np.linalg.inv(_GENERIC if declared is None else _DECLARED)
        )
        self._vector = self._precision @ np.log(center)
        self._replicas: dict[str, ReplicaEstimator] = {}
        self._restored: dict[str, FloatArray] = {}

    def add(self, name: str) -> ReplicaEstimator:
        """Add a replica, or return that of the name."""
        if name not in self._replicas:
            mean = np.linalg.solve(self._precision, self._vector)
            replica = self._replicas[name] = ReplicaEstimator(mean, self._precision)
            if name in self._restored:
                replica.take_up(self._restored.pop(name))
            self.share()
        return self._replicas[name]

    def saved(self) -> dict[str, Any]:
        """What the equations of each replica say, as JSON has it."""
        return {
            name: replica.numbers.tolist()
            for name, replica in self._replicas.items() if replica.num_observations
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take up what was saved, for replicas that are there or will come.

        Raises:
            ValueError: It is not of this form.
        """
        restored = {name: np.array(numbers, float) for name, numbers in saved.items()}
        for numbers in restored.values():
            if numbers.shape != (26,) or not np.isfinite(numbers).all() or numbers[24] <= 0.0:
                raise ValueError("what is known of a replica's speed are 26 numbers")
        for name in restored.keys() & self._replicas.keys():
            self._replicas[name].take_up(restored.pop(name))
        self._restored |= restored
        self.share()

    def drop(self, name: str) -> None:
        """Forget a replica."""
        self._replicas.pop(name, None)

    def share(self) -> None:
        """Give every replica the prior that all others make, and round what is believed of them.

        To be called now and then: it takes a millisecond for 64 replicas.
        """
        replicas = [*self._replicas.values()]
        if not replicas:
            return
        for replica in replicas:
            replica.solve()
        evidence = [replica.evidence for replica in replicas]
        information = np.array([own for own, _ in evidence])
        vectors = np.array([vector for _, vector in evidence])[:, :, None]
        # What each says of their mean, its own deviation unknown.
        damped = np.linalg.inv(np.eye(4) + information @ _REPLICAS)
        precisions, said = damped @ information, damped @ vectors
        covariances = np.linalg.inv(self._precision + precisions.sum(axis=0) - precisions)
        means = covariances @ (self._vector[:, None] + said.sum(axis=0) - said)
        priors = np.linalg.inv(covariances + _REPLICAS)
        covariances = np.linalg.inv(priors + information)
        logs = (covariances @ (priors @ means + vectors))[:, :, 0]
        for at, replica in enumerate(replicas):
            replica.prior, replica.prior_vector = priors[at], (priors[at] @ means[at])[:, 0]
            if replica.is_solved:
                replica.believe(logs[at], covariances[at])
        self._round(replicas, np.array([replica.log for replica in replicas]), covariances)

    def _round(
        self, replicas: list[ReplicaEstimator], logs: FloatArray, covariances: FloatArray
    ) -> None:
        """Let replicas have the same coefficients that are not told apart.

        Noise would otherwise send all requests of an idle pool to one of its equal replicas.
        They are compared by the times of a mean batch and of a prompt's token.
        """
        seen = [replica.mean_batch for replica in replicas if replica.num_observations]
        parts = np.exp(logs) * (np.mean(seen, axis=0) if seen else np.eye(4)[0])
        total = parts.sum(axis=1, keepdims=True)
        shares = parts / total
        variances = np.einsum("ri,rij,rj->r", shares, covariances, shares), covariances[:, 1, 1]
        times = np.stack([np.log(total[:, 0]), logs[:, 1]], axis=1).tolist()
        spreads = np.stack(variances, axis=1).tolist()
        left = sorted(range(len(replicas)), key=times.__getitem__)
        while left:
            first = left[0]
            group = [
                index for index in left
                if all(map(_is_same, times[first], times[index], spreads[first], spreads[index]))
            ]  # fmt: skip
            common = _on_grid(logs[group].mean(axis=0))
            for index in group:
                replicas[index].shared_iteration = common
            left = [index for index in left if index not in group]


def _is_same(first: float, second: float, variance: float, more: float) -> bool:
    """Whether two logarithms may be the same, or are nearly so."""
    return abs(first - second) <= min(max(2 * math.sqrt(variance + more), _ALIKE), _UNLIKE)


def _on_grid(log: FloatArray) -> FloatArray:
    """Round logarithms, so that policies are not told of every small change, and return seconds."""
    return np.asarray(np.exp(np.round(log / _GRID) * _GRID))


class BatchLimitEstimator:
    """The most sequences that an engine runs at once, from what it says runs and waits."""

    def __init__(self) -> None:
        self._most = self._num_full = 0

    def observe(self, running: int, waiting: int) -> None:
        """Take what runs and what waits at one time, where memory was not the reason to wait."""
        if running > self._most:
            self._most, self._num_full = running, 0
        if waiting > 0:
            # While prompts take turns, something waits below the limit, too.
            self._num_full += 1 if running == self._most else -1
            self._num_full = min(max(self._num_full, 0), 2 * _TIMES_FULL)

    @property
    def estimate(self) -> int | None:
        """The limit; None: the engine has not been full."""
        return self._most if self._num_full >= _TIMES_FULL else None


class AnswerMeter:
    """Counts the tokens of all answers of a replica, and makes equations for its estimator.

    One stream at a time is the clock: from one of its tokens to a later one there were as many
    iterations as it got tokens. Those of others that come right after either are of the same
    iteration. A token of another costs two additions. An answer that comes as a
    whole makes an equation of its own, with the mean number in flight meanwhile. Equations are
    only noted here, where requests pass; `settle` solves them.
    """

    def __init__(
        self, estimator: ReplicaEstimator, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.estimator = estimator
        self.times_own = 1.0
        """Requests there, those of others included, over those that are counted here."""
        self.max_batch, self.token_budget = math.inf, math.inf
        self._clock_s, self._changed_s = clock_s, clock_s()
        self._prefilled = self._decoded = self._kv = self._prefill_sent = 0.0
        self._sent: dict[str, tuple[float, float, float]] = {}
        """Of requests in flight: when they were sent, `_area` and `_prefill_sent` then."""
        self._area = 0.0
        """Integral over time of the requests in flight."""
        self._unseen: dict[str, float] = {}
        """Prompts of requests that are answered elsewhere, tokens, from their first token on."""
        self._probe, self._alone = "", ""
        """The stream that is the clock, and the request that its replica was idle for."""
        self._iterations = 0
        self._since: tuple[float, ...] = ()
        """When its stretch began, and the tokens of all until then: prefilled, decoded, KV."""
        self._edge_s: float | None = None
        """When the stretch has ended, until all tokens of that iteration have come; None: it has
        not."""
        self._burst_s = _FIRST_BURST_S
        """How long those take to come."""
        self._held, self._whole_s = 0.0, -math.inf
        self._equations: deque[tuple[float, ...]] = deque(maxlen=_MOST_NOTED)
        self._settled: deque[tuple[float, ...]] = deque(maxlen=_MOST_NOTED)

    def send(self, request_id: str, computed: float) -> None:
        """Note that a request is sent, of whose prompt so many tokens are not cached."""
        now_s = self._clock_s()
        self._area += len(self._sent) * (now_s - self._changed_s)
        self._changed_s = now_s
        self._alone = "" if self._sent else request_id
        self._sent[request_id] = now_s, self._area, self._prefill_sent
        self._prefill_sent += computed

    def receive(
        self, request_id: str, num_new: int, num_before: int, computed: float, context: float
    ) -> None:
        """Note tokens of a stream that have come, after so many before.

        `computed` are the tokens of its prompt that were not cached, `context` all of them.
        """
        if self._edge_s is not None and self._clock_s() - self._edge_s > self._burst_s:
            tokens = self._prefilled, self._decoded, self._kv
            if self._since:
                time_s, before = self._edge_s - self._since[0], self._since[1:]
                new = [
                    self.times_own * (now - then) for now, then in zip(tokens, before, strict=True)
                ]
                self._equations.append((time_s, self._iterations, *new))
                self._burst_s = min(time_s / self._iterations / 4, _LONGEST_BURST_S)
            self._since, self._iterations, self._edge_s = (self._edge_s, *tokens), 0, None
        if not num_before:
            num_new -= 1
            self._prefilled += computed
            if self._alone == request_id and request_id in self._sent and self.times_own < 1.1:
                time_s = self._clock_s() - self._sent[request_id][0]
                iterations = max(math.ceil(computed / self.token_budget), 1)
                self._equations.append((time_s, iterations, computed, 0, 0, _VAGUE))
                self._alone = ""
        self._decoded += num_new
        self._kv += num_new * (context + num_before)
        if self._probe == request_id:
            self._iterations += num_new
            if self._unseen:
                self._decoded += num_new * len(self._unseen)
                self._kv += num_new * sum(self._unseen.values())
            if self._iterations < _FEWEST_ITERATIONS or self._edge_s is not None:
                return
            shortest_s = _SHORTEST_S * (4 if self.estimator.num_observations > _MANY else 1)
            if (now_s := self._clock_s()) - self._since[0] >= shortest_s:
                self._edge_s = now_s
        elif not self._probe:
            self._probe, self._since, self._edge_s = request_id, (), self._clock_s()

    def receive_unseen(self, request_id: str, computed: float, context: float) -> None:
        """Note a stream that goes elsewhere, and has begun: it gets a token in each iteration."""
        if request_id not in self._unseen:
            self._prefilled += computed
            self._unseen[request_id] = context

    def receive_whole(
        self, request_id: str, num_tokens: int, computed: float, context: float
    ) -> None:
        """Note an answer that came as a whole."""
        now_s, last = self._clock_s(), num_tokens - 1
        area_now = self._area + len(self._sent) * (now_s - self._changed_s)
        sent_s, area, prefill_sent = self._sent.get(request_id, (now_s, 0.0, 0.0))
        self._prefilled += computed
        held = context + last / 2
        self._held += (1.0 if not self._held else 0.05) * (held - self._held)
        if now_s - self._whole_s < _WHOLE_EVERY_S or last < 0 or now_s <= sent_s:
            return
        self._whole_s = now_s
        running = self.times_own * (area_now - area) / (now_s - sent_s)
        if running > self.max_batch:  # It has waited, nobody knows how long.
            return
        iterations = last + max(math.ceil(computed / self.token_budget), 1)
        prefill = self.times_own * (self._prefill_sent - prefill_sent)
        decoded = last * running
        self._equations.append(
            (now_s - sent_s, iterations, prefill, decoded, decoded * self._held, _VAGUE)
        )

    def end(self, request_id: str) -> None:
        """Note that a request is in flight no longer."""
        now_s = self._clock_s()
        self._area += len(self._sent) * (now_s - self._changed_s)
        self._changed_s = now_s
        self._sent.pop(request_id, None)
        self._unseen.pop(request_id, None)
        if self._alone == request_id:
            self._alone = ""
        if self._probe == request_id:
            self._probe, self._edge_s = "", None

    def settle(self) -> None:
        """Give the estimator the equations that were noted."""
        while self._equations:
            self._settled.append(self._equations.popleft())
            self.estimator.observe(*self._settled[-1])

    def take_settled(self) -> list[tuple[float, ...]]:
        """Return the equations since the last call, for others who know the same replica."""
        settled = [*self._settled]
        self._settled.clear()
        return settled

    def hear(self, equation: Sequence[float]) -> None:
        """Take an equation of somebody else, as `take_settled` returns it."""
        time_s, iterations, prefill, decoded, kv, weight = (*map(float, equation), 1.0)[:6]
        weight = min(max(weight, _VAGUE), 1.0)
        self.estimator.observe(time_s, iterations, prefill, decoded, kv, weight)
