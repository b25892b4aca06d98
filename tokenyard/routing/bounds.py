"""What a router could reach that looks further than policies do: bounds from above.

On a fleet, `ahead_own` and `ahead_marginal` know the true state of every replica and the true
length of every request that has arrived, and play each replica to its end with and without the
one to be placed, as if nothing more came. They take it where it finishes first, or where that and
the delay of all others are least. That nothing more comes is wrong: who learns what does may do
better, and then the bound shows just what is not to be had from better estimates alone.

`clairvoyant` knows the future of serial servers, where the state of a server is just the time at
which it gets free: a beam search over placements, where SED over the true arrivals to come
estimates what a partial placement still costs. Its result is a feasible placement, so the true
optimum is at least as good.

All need the simulator's view, so they are no policies; evaluation names them beside policies to
show what is left to win.

Shapes: S servers, R requests, B beam width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.constant_rate import ClusterSim, Outcomes
from tokenyard.routing.simulator.copies import Actions
from tokenyard.routing.simulator.run import Chooser, repeating
from tokenyard.types import FloatArray

BoundObjective = Literal["mean", "mean_and_slo"]

_MISS_COST_S: dict[BoundObjective, float] = {"mean": 0.0, "mean_and_slo": 2.0}
"""What a response beyond the SLO costs on top of its length, seconds."""

BEAM_WIDTH = 64
BEAM_HORIZON = 120

# Columns of the requests that the search reads.
_DISPATCH_S, _ARRIVAL_S, _TOKENS = kernel.DISPATCH_S, kernel.ARRIVAL_S, kernel.TRUE_TOTAL


@compiled
def _cost_s(response_s: float, terms: FloatArray) -> float:
    """Cost of one response: its length, plus terms[1] if beyond the SLO terms[0]; seconds."""
    return response_s + terms[1] if response_s > terms[0] else response_s


@compiled
def _copy(source: FloatArray, target: FloatArray) -> None:
    """Copy a row; assigning an array to a slice would allocate."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@compiled
def _sed(free_s: FloatArray, speeds: FloatArray, dispatch_s: float, tokens: float) -> int:
    """Server on which the request finishes first; the first of equals."""
    best = 0
    best_s = max(free_s[0], dispatch_s) + tokens / speeds[0]
    for server in range(1, speeds.shape[0]):
        finish_s = max(free_s[server], dispatch_s) + tokens / speeds[server]
        if finish_s < best_s:
            best_s = finish_s
            best = server
    return best


@compiled
def _place(
    free_s: FloatArray, speeds: FloatArray, server: int, dispatch_s: float, tokens: float
) -> float:
    """Put a request on a server and return when it finishes, seconds."""
    finish_s: float = max(free_s[server], dispatch_s) + tokens / speeds[server]
    free_s[server] = finish_s
    return finish_s


@compiled
def _follow_sed(
    free_s: FloatArray,
    speeds: FloatArray,
    terms: FloatArray,
    requests: FloatArray,
    first: int,
    last: int,
) -> float:
    """Cost of requests first..last-1 under SED; uses up `free_s`.

    Where the traffic goes on after them, the backlog they leave is charged too.
    """
    cost_s = 0.0
    for index in range(first, last):
        tokens = requests[index, _TOKENS]
        dispatch_s = requests[index, _DISPATCH_S]
        server = _sed(free_s, speeds, dispatch_s, tokens)
        finish_s = _place(free_s, speeds, server, dispatch_s, tokens)
        cost_s += _cost_s(finish_s - requests[index, _ARRIVAL_S], terms)
    if first < last < requests.shape[0]:
        cost_s += terms[2] * _backlog_s(free_s, speeds, requests[last - 1, _DISPATCH_S]) ** 2
    return cost_s


@compiled
def _backlog_s(free_s: FloatArray, speeds: FloatArray, now_s: float) -> float:
    """Time that all servers together need for what they hold, seconds."""
    tokens = 0.0
    tokens_per_s = 0.0
    for server in range(speeds.shape[0]):
        tokens += max(free_s[server] - now_s, 0.0) * speeds[server]
        tokens_per_s += speeds[server]
    return tokens / tokens_per_s


@compiled
def _dominated(
    frees_s: FloatArray, costs_s: FloatArray, kept: int, free_s: FloatArray, cost_s: float
) -> bool:
    """Whether one of the kept placements costs no more and has every server free no later."""
    for other in range(kept):
        if costs_s[other] <= cost_s:
            server = 0
            while server < free_s.shape[0] and frees_s[other, server] <= free_s[server]:
                server += 1
            if server == free_s.shape[0]:
                return True
    return False


@compiled
def _expand(
    speeds: FloatArray,
    terms: FloatArray,
    requests: FloatArray,
    index: int,
    horizon: int,
    frees_s: FloatArray,
    costs_s: FloatArray,
    child: int,
    width: int,
) -> float:
    """Place request `index` as `child` says and return what the whole is estimated to cost."""
    num_servers = speeds.shape[0]
    parent = child // num_servers
    dispatch_s = requests[index, _DISPATCH_S]
    free_s = frees_s[width + child]
    for server in range(num_servers):
        # Only what is busy beyond now matters: idle servers are all alike.
        free_s[server] = max(frees_s[parent, server], dispatch_s)
    tokens = requests[index, _TOKENS]
    finish_s = _place(free_s, speeds, child % num_servers, dispatch_s, tokens)
    cost_s = costs_s[parent] + _cost_s(finish_s - requests[index, _ARRIVAL_S], terms)
    costs_s[width + child] = cost_s
    scratch_s = frees_s[-1]
    _copy(free_s, scratch_s)
    last = min(index + 1 + horizon, requests.shape[0])
    to_go_s = _follow_sed(scratch_s, speeds, terms, requests, index + 1, last)
    total_s: float = cost_s + to_go_s
    return total_s


@compiled
def _insert(order: Actions, values_s: FloatArray, child: int) -> None:
    """Put `child` among order[:child], which is sorted by value; equals keep their order."""
    at = child
    while at > 0 and values_s[order[at - 1]] > values_s[child]:
        order[at] = order[at - 1]
        at -= 1
    order[at] = child


@compiled
def _keep_best(
    frees_s: FloatArray,
    costs_s: FloatArray,
    order: Actions,
    num_servers: int,
    parents: Actions,
    moves: Actions,
) -> int:
    """Keep the best children that are not dominated; return how many they are."""
    width = parents.shape[0]
    kept = 0
    for child in order:
        if kept == width:
            break
        free_s = frees_s[width + child]
        cost_s = costs_s[width + child]
        if not _dominated(frees_s, costs_s, kept, free_s, cost_s):
            _copy(free_s, frees_s[kept])
            costs_s[kept] = cost_s
            parents[kept] = child // num_servers
            moves[kept] = child % num_servers
            kept += 1
    return kept


@compiled
def _search(
    speeds: FloatArray,
    terms: FloatArray,
    requests: FloatArray,
    horizon: int,
    frees_s: FloatArray,
    costs_s: FloatArray,
    values_s: FloatArray,
    order: Actions,
    parents: Actions,
    moves: Actions,
) -> None:
    """Beam search over all placements of the stream.

    Args:
        speeds: Tokens per second, shape (S,).
        terms: As `_terms` gives them, shape (3,).
        requests: The stream, shape (R, NUM_REQUEST).
        horizon: Arrivals over which SED estimates the cost to go.
        frees_s: When each server gets free in each kept placement and in each of their
            children, zeros, shape (B + B S + 1, S); the last row is scratch.
        costs_s: What they cost so far, zeros, shape (B + B S,).
        values_s: Estimated total cost of each child, shape (B S,).
        order: Scratch, shape (B S,).
        parents: Filled with the kept placement that each kept one continues, shape (R, B).
        moves: Filled with the server that it chose, shape (R, B). The first of the placements
            kept at the end is the best.
    """
    kept = 1
    for index in range(requests.shape[0]):
        num_children = kept * speeds.shape[0]
        for child in range(num_children):
            values_s[child] = _expand(
                speeds, terms, requests, index, horizon, frees_s, costs_s, child, parents.shape[1]
            )
            _insert(order, values_s, child)
        kept = _keep_best(
            frees_s, costs_s, order[:num_children], speeds.shape[0], parents[index], moves[index]
        )


def _require_serial(scenario: Scenario) -> None:
    if scenario.fleet:
        raise ValueError(
            f"scenario {scenario.name!r} has a fleet: clairvoyant is for serial servers "
            "that queue; ahead_own and ahead_marginal for replicas that batch"
        )
    if scenario.discipline != "serial" or scenario.overflow != "queue":
        raise ValueError(
            f"scenario {scenario.name!r} is {scenario.discipline} with overflow "
            f"{scenario.overflow!r}: bounds exist for serial servers that queue, whose state is "
            "the time at which each gets free"
        )


def _terms(scenario: Scenario, objective: BoundObjective, traffic: FloatArray) -> FloatArray:
    """What a response costs (SLO and the cost of missing it, s), and what a backlog costs (1/s).

    A backlog of b seconds drains in b / (1 - load); the arrivals meanwhile wait b / 2 on average
    (fluid approximation), so it costs b^2 x rate / (2 (1 - load)). A load above 0.95 counts as
    0.95: in overload nothing drains.
    """
    duration_s = traffic[-1, _DISPATCH_S] - traffic[0, _DISPATCH_S]
    rate_per_s = len(traffic) / duration_s if duration_s > 0 else 0.0
    load = rate_per_s * traffic[:, _TOKENS].mean() / scenario.capacity_tokens_per_s
    backlog_cost_per_s = rate_per_s / (2.0 * (1.0 - min(load, 0.95)))
    return np.array([scenario.slo_response_s, _MISS_COST_S[objective], backlog_cost_per_s])


def exact_sed(scenario: Scenario, requests: FloatArray) -> Outcomes:
    """Place by shortest expected delay with true sizes: a beam of one that looks at no future.

    Args:
        scenario: Serial servers that queue.
        requests: The stream, shape (num_requests, kernel.NUM_REQUEST).

    Raises:
        ValueError: The servers are not serial, or drop requests.
    """
    return _searched(scenario, requests, "mean", 1, 0)


def clairvoyant(
    scenario: Scenario,
    requests: FloatArray,
    objective: BoundObjective = "mean",
    *,
    beam_width: int = BEAM_WIDTH,
    horizon: int = BEAM_HORIZON,
) -> Outcomes:
    """Place with the whole future known, by beam search with SED as the cost to go.

    Never worse than `exact_sed` on its objective: where the search ends up worse, that is the
    answer. Exact where the beam holds every placement that is not dominated.

    Args:
        scenario: Serial servers that queue.
        requests: The stream, shape (num_requests, kernel.NUM_REQUEST).
        objective: `mean` response, or `mean_and_slo`: with 2 s more for each SLO violation.
        beam_width: Partial placements kept after every request.
        horizon: True arrivals over which SED estimates what a placement will cost.

    Raises:
        ValueError: The servers are not serial, or drop requests.
    """
    beam = _searched(scenario, requests, objective, beam_width, horizon)
    sed = exact_sed(scenario, requests)
    return min(beam, sed, key=lambda outcomes: _mean_cost_s(outcomes, scenario, objective))


def _searched(
    scenario: Scenario, requests: FloatArray, objective: BoundObjective, beam_width: int,
    horizon: int,
) -> Outcomes:  # fmt: skip
    _require_serial(scenario)
    num, num_servers = len(requests), scenario.num_servers
    children = beam_width * num_servers
    parents, moves = np.zeros((2, num, beam_width), dtype=np.int64)
    speeds = np.array([server.tokens_per_s for server in scenario.servers])
    _search(
        speeds, _terms(scenario, objective, requests), requests, horizon,
        np.zeros((beam_width + children + 1, num_servers)), np.zeros(beam_width + children),
        np.empty(children), np.empty(children, dtype=np.int64), parents, moves,
    )  # fmt: skip
    sim = ClusterSim(scenario, 1, num)
    sim.load(0, requests)
    for action in _trace_back(parents, moves)[:, None]:
        sim.step(action)
    sim.drain()
    return sim.view().outcomes()


def _trace_back(parents: Actions, moves: Actions) -> Actions:
    actions = np.empty(len(moves), dtype=np.int64)
    placement = 0
    for index in reversed(range(len(moves))):
        actions[index] = moves[index, placement]
        placement = parents[index, placement]
    return actions


def _mean_cost_s(outcomes: Outcomes, scenario: Scenario, objective: BoundObjective) -> float:
    violations = outcomes.response_s > scenario.slo_response_s
    return float(np.mean(outcomes.response_s + _MISS_COST_S[objective] * violations))


def _ahead(others_weight: float, scenario: Scenario, requests: FloatArray, seed: int) -> Chooser:
    if scenario.fleet is None:
        raise ValueError(
            f"scenario {scenario.name!r} has no fleet: ahead_own and ahead_marginal look into "
            "replicas that batch; clairvoyant is for serial servers"
        )
    # The simulator of a fleet is asked.
    return lambda sim, copy: cast(BatchingSim, sim).view(copy).best_ahead(others_weight)


def _clairvoyant(scenario: Scenario, requests: FloatArray, seed: int) -> Chooser:
    return repeating(clairvoyant(scenario, requests).server)


BOUNDS: dict[str, Callable[[Scenario, Any, int], Chooser]] = {
    "clairvoyant": _clairvoyant,
    "ahead_own": partial(_ahead, 0.0),
    "ahead_marginal": partial(_ahead, 1.0),
}
"""Bounds by name: what chooses in (scenario, stream, seed).

Raises:
    ValueError: The bound does not exist for the scenario's servers.
"""
