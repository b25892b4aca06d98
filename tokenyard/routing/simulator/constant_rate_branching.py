"""Choices tried out where servers work at a constant rate (`branching`).

A first-come response time is known when a request is placed, so nothing has to be played to its
end. Most futures meet again: once two copies hold the same work, all that follows is the same, and
no more of it is played.
"""

from __future__ import annotations

from tokenyard.compiled import compiled
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.scenario import NO_REWARD, Scenario
from tokenyard.routing.scores.linear import fill_cost_parts, marginal_scores
from tokenyard.routing.scores.order import FIRST_COME
from tokenyard.routing.scores.residual import make_player, rule_alone
from tokenyard.routing.scores.waiting_key import LAST, bounded_key
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.simulator.batching_streams import Stream
from tokenyard.routing.simulator.branching import (
    LOST_S,
    TAIL_AFTER_S,
    TAIL_WEIGHT,
    VIOLATION_S,
    Branching,
    BranchingConfig,
)
from tokenyard.routing.simulator.constant_rate import ClusterSim
from tokenyard.types import FloatArray

_SAME_S = 1e-9
"""Work that differs by less is the same."""


class ConstantRateBranching(Branching):
    """Copies of servers: the one that is played, a future per server, and one to compare with."""

    num_features = NUM_MARGINAL_WEIGHTS

    def __init__(self, scenario: Scenario, mean_total_tokens: float) -> None:
        """Make room for streams of the scenario's length.

        Raises:
            ValueError: Capacity is shared, so that no response is known when it is placed.
        """
        if scenario.discipline == "processor_sharing":
            raise ValueError(f"{scenario.name} shares capacity; choose a scenario that queues")
        super().__init__(scenario, mean_total_tokens)
        length = scenario.requests_per_stream
        self._sim = ClusterSim(scenario, scenario.num_servers + 2, length, NO_REWARD)

    def _load(self, stream: Stream) -> None:
        # All copies read the stream of the first, and note in its outcomes what nobody reads.
        self._sim.load(0, stream)

    def _offered_s(self, weights: FloatArray) -> FloatArray:
        sim = self._sim
        first = slice(0, 1)
        num, slo_s = sim.scenario.num_servers, sim.scenario.slo_response_s
        player = make_player(rule_alone(weights), num, self._mean_total_tokens, slo_s)
        kernel.run_residual(
            sim.params, sim.rules, sim.state[first], sim.clock[first], sim.requests[first],
            sim.outcome_table[first], sim.tables[first], player, FIRST_COME,
        )  # fmt: skip
        return sim.view().outcomes().offered_response_s

    def _sample(self, weights: FloatArray, prices: FloatArray, config: BranchingConfig) -> int:
        sim = self._sim
        sim.clear(0)
        found: int = _sample(
            sim.params, sim.rules, sim.state, sim.requests[0], sim.outcome_table[0], sim.tables[0],
            weights, self._mean_total_tokens, prices, config.margin_slos, config.every,
            config.horizon, self._scores, self._costs_from, self._tried, self._costs_s,
            self._counts,
        )  # fmt: skip
        return found


@compiled
def _copy_state(source, rules, target):
    """Copy what all servers of one copy hold, leaving out the empty places of their queues."""
    for server in range(source.shape[0]):
        kernel.copy_server(source[server], rules, target[server])


@compiled
def _holds_the_same(one, other, params, rules, now):
    """Whether two copies, advanced to `now`, will do the same from here on."""
    free_at = kernel.STATE + 3 * int(rules[kernel.MAX_RUNNING])
    for server in range(one.shape[0]):
        mine, theirs = one[server], other[server]
        if mine[kernel.RUNNING] != theirs[kernel.RUNNING]:
            return False
        if mine[kernel.WAITING] != theirs[kernel.WAITING]:
            return False
        for slot in range(free_at, free_at + int(params[server, kernel.SLOTS])):
            if abs(max(mine[slot], now) - max(theirs[slot], now)) > _SAME_S:
                return False
    return True


@compiled
def _paid_s(placed, response_s, slo_s, prices):
    """What a request costs that was placed, or dropped."""
    if not placed:
        response_s = prices[LOST_S]
    paid = response_s + prices[TAIL_WEIGHT] * max(response_s - prices[TAIL_AFTER_S], 0.0)
    return paid + prices[VIOLATION_S] if response_s > slo_s else paid


@compiled
def _place_s(state, rules, params, requests, outcomes, index, server, prices):
    """Place a request; return what it costs."""
    now = requests[index, kernel.DISPATCH_S]
    key = bounded_key(LAST, now, now, 0.0)
    placed, response_s = kernel.place(
        state[server], rules, params[server], requests, outcomes, index, server, now, key
    )
    return _paid_s(placed, response_s, rules[kernel.SLO_S], prices)


@compiled
def _decide(state, rules, params, requests, index, table, weights, mean_total_tokens, scores):
    """Server that the policy takes, in a copy that has been advanced to the request."""
    kernel.fill_table(state, rules, params, requests, requests[index, kernel.DISPATCH_S], table)
    context_tokens = requests[index, kernel.CONTEXT]
    return marginal_scores(
        weights, context_tokens, requests[index, kernel.PREDICTED_TOTAL] - context_tokens,
        mean_total_tokens, rules[kernel.SLO_S], table, scores,
    )  # fmt: skip


@compiled
def _play_on(
    params, rules, state, requests, outcomes, table, weights, mean_total_tokens, prices, scores,
    index, chosen, last, open_, costs_s,
):  # fmt: skip
    """Play the futures of one decision side by side; return how many requests were placed.

    `costs_s` become what each future costs beyond the chosen one's. Once a future holds what the
    chosen one does, it is no longer `open_`.
    """
    num = params.shape[0]
    left = 0
    for server in range(num):
        if open_[server] != 0.0:
            _copy_state(state[0], rules, state[1 + server])
            costs_s[server] = _place_s(
                state[1 + server], rules, params, requests, outcomes, index, server, prices
            )
            left += 1
    placed = left
    left -= 1
    before = state[1 + num]
    for later in range(index + 1, last):
        if left == 0:
            break
        now = requests[later, kernel.DISPATCH_S]
        own = state[1 + chosen]
        kernel.advance(own, rules, params, requests, outcomes, now)
        _copy_state(own, rules, before)
        so_far = costs_s[chosen]
        for turn in range(-1, num):
            server = chosen if turn < 0 else turn
            if turn >= 0 and (server == chosen or open_[server] == 0.0):
                continue
            future = state[1 + server]
            if turn >= 0:
                kernel.advance(future, rules, params, requests, outcomes, now)
                if _holds_the_same(future, before, params, rules, now):
                    costs_s[server] -= so_far
                    open_[server] = 0.0
                    left -= 1
                    continue
            to = _decide(
                future, rules, params, requests, later, table, weights, mean_total_tokens, scores
            )
            costs_s[server] += _place_s(
                future, rules, params, requests, outcomes, later, to, prices
            )
            placed += 1
    for server in range(num):
        if open_[server] != 0.0 and server != chosen:
            costs_s[server] -= costs_s[chosen]
    costs_s[chosen] = 0.0
    return placed


@compiled
def _sample(
    params, rules, state, requests, outcomes, table, weights, mean_total_tokens, prices,
    margin_slos, every, horizon, scores, costs_from, tried, costs_s, counts,
):  # fmt: skip
    """Play a stream and fill in its close decisions; return how many they are."""
    num = params.shape[0]
    num_requests = requests.shape[0]
    found = 0
    close = 0
    for index in range(num_requests):
        now = requests[index, kernel.DISPATCH_S]
        kernel.advance(state[0], rules, params, requests, outcomes, now)
        chosen = _decide(
            state[0], rules, params, requests, index, table, weights, mean_total_tokens, scores[0]
        )
        num_close = 0
        for server in range(num):
            near = scores[0, server] - scores[0, chosen] <= margin_slos
            tried[found, server] = near
            costs_s[found, server] = 0.0
            num_close += near
        if num_close > 1:
            if close % every == 0:
                context_tokens = requests[index, kernel.CONTEXT]
                fill_cost_parts(
                    weights, context_tokens,
                    requests[index, kernel.PREDICTED_TOTAL] - context_tokens, mean_total_tokens,
                    rules[kernel.SLO_S], table, costs_from[found],
                )  # fmt: skip
                for server in range(num):
                    # The second row of scores says which futures go on.
                    scores[1, server] = 1.0 if tried[found, server] else 0.0
                counts[0] += _play_on(
                    params, rules, state, requests, outcomes, table, weights, mean_total_tokens,
                    prices, scores[0], index, chosen, min(index + 1 + horizon, num_requests),
                    scores[1], costs_s[found],
                )  # fmt: skip
                found += 1
            close += 1
        _place_s(state[0], rules, params, requests, outcomes, index, chosen, prices)
        counts[0] += 1
    return found
