"""Decisions: place a request, pay for it, run to the next; and whole runs under a rule."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.routing.scores.linear import encode_shown, looks_at_queues
from tokenyard.routing.scores.order import is_first_come, order_delay_s, order_key
from tokenyard.routing.scores.places import fill_place
from tokenyard.routing.scores.residual import residual_scores
from tokenyard.routing.scores.waiting_key import KEY_S, LAST, LATE_AT_S, LATE_KEY_S, bounded_key
from tokenyard.routing.simulator import rewards as pay
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.fleet import (
    clear,
    find_decision,
    kv_used,
    note_sent_blocks,
    requeue,
    submit,
    track_request,
)
from tokenyard.routing.simulator.batching_kernel.iteration import advance
from tokenyard.routing.simulator.batching_kernel.layout import replica_of
from tokenyard.routing.simulator.batching_kernel.lookahead import copied, play_out
from tokenyard.routing.simulator.batching_kernel.queue import waiting_at
from tokenyard.routing.simulator.batching_kernel.sequences import router_acknowledge
from tokenyard.routing.simulator.batching_kernel.view import fill_table


@compiled
def place(fleet, copy, server, raw_key):
    """Send the current request to a replica; return the reward that is due at once.

    Where it has to wait, it waits by what is asked for (`bounded_key`).
    """
    clock = fleet.clock[copy]
    rules = fleet.rules
    index = int(clock[lay.CURRENT])
    now = clock[lay.NOW_S]
    outcomes = fleet.outcomes[copy]
    waiting = 0.0
    kv = 0.0
    num = fleet.replica_params.shape[1]
    for other in range(num):
        waiting += fleet.state[copy, other, lay.WAITING]
        kv += kv_used(fleet.state[copy, other], fleet.replica_params[copy, other])
    outcomes[index, lay.WAITING_SEEN] = waiting
    outcomes[index, lay.KV_SEEN] = kv / num
    outcomes[index, lay.SERVER] = server
    outcomes[index, lay.ATTEMPTS] += 1.0
    # A new attempt is a new submission.
    outcomes[index, lay.SUBMITTED] = clock[lay.PLACED]
    clock[lay.PLACED] += 1.0
    replica = replica_of(fleet, copy, server)
    row = replica.row
    # Before it is submitted: the router acknowledges who has hung up at once.
    track_request(replica, index, fleet.tables[copy, server, ob.MATCH_TOKENS])
    request = fleet.requests[copy, index]
    key = bounded_key(raw_key, request[lay.ARRIVAL_S], now, rules[lay.MAX_OVERTAKING_S])
    if not submit(replica, index, now, key):
        router_acknowledge(replica, index, 0.0)
        return 0.0 if requeue(fleet, copy, index, now) else rules[pay.DROP]
    note_sent_blocks(replica, index, now)
    reward = rules[pay.ACCEPT]
    if rules[lay.LOOKS_AHEAD]:
        ahead = copied(replica, fleet.scratch)
        play_out(ahead, -1)
        responses, joules = ahead.row[lay.RESPONSE_REWARD], ahead.row[lay.BUSY_J]
        reward += responses - row[lay.RESPONSE_REWARD]
        reward += rules[lay.ENERGY] * (joules - row[lay.LOOKED_J])
        row[lay.RESPONSE_REWARD] = responses
        row[lay.LOOKED_J] = joules
    return reward


@compiled
def best_ahead(fleet, copy, others_weight):
    """Replica where the current request does best, seen from the true state and true lengths.

    Every replica is played to its end with and without the request, as if nothing more came. The
    cost is when the request would leave plus `others_weight` times how much longer all others
    would stay; the first of equals, and the first of all where none takes it.
    """
    index = int(fleet.clock[copy, lay.CURRENT])
    now = fleet.clock[copy, lay.NOW_S]
    best = 0
    least = math.inf
    for server in range(fleet.replica_params.shape[1]):
        replica = replica_of(fleet, copy, server)
        before = play_out(copied(replica, fleet.scratch), -1)[0]
        ahead = copied(replica, fleet.scratch)
        if not submit(ahead, index, now, bounded_key(LAST, now, now, math.inf)):
            continue
        after, finish = play_out(ahead, index)
        cost = finish + others_weight * (after - finish - before)
        if cost < least:
            least = cost
            best = server
    return best


@compiled
def _collect(fleet, copy):
    """Reward terms that completions have earned since the last call."""
    earned = 0.0
    for server in range(fleet.replica_params.shape[1]):
        earned += fleet.state[copy, server, lay.EARNED]
        fleet.state[copy, server, lay.EARNED] = 0.0
    return earned


@compiled
def asked_key(order, request, row):
    """What an order asks for at a replica (`scores.order.order_key`); first come asks for none."""
    if is_first_come(order):
        return LAST
    return order_key(
        order, request[lay.ARRIVAL_S], min(request[lay.SLO_TTFT_S], request[lay.SLO_RESPONSE_S]),
        request[lay.CONTEXT], request[lay.PREDICTED_OUTPUT], 0.0, row,
    )  # fmt: skip


@compiled
def fill_places(fleet, copy, order):
    """Write where the current request would stand in each queue (`policies.places`)."""
    requests = fleet.requests[copy]
    request = requests[int(fleet.clock[copy, lay.CURRENT])]
    for server in range(fleet.replica_params.shape[1]):
        row, seen = fleet.state[copy, server], fleet.tables[copy, server]
        waiting = int(row[int(fleet.rules[lay.RING_AT]) + 1])
        if waiting == 0:
            continue
        key_s = request[lay.ARRIVAL_S] + order_delay_s(
            order, request[lay.CONTEXT], request[lay.PREDICTED_OUTPUT], seen
        )
        before = 0
        behind = 0
        tokens = 0.0
        for number in range(waiting):
            at = waiting_at(row, fleet.rules, number)
            other = requests[int(row[at + lay.W_INDEX])]
            if other[lay.ROUTER] != request[lay.ROUTER]:
                continue
            later = other[lay.PRIORITY] - request[lay.PRIORITY]
            if later > 0.0 or (later == 0.0 and row[at + lay.W_KEY_S] > key_s):
                behind += 1
                tokens += other[lay.CONTEXT]
            else:
                before += 1
        fill_place(seen, before, behind, tokens)


@compiled
def step(fleet, actions, rewards):
    """Place the waiting request of every copy and run to the moment of the next decision.

    A copy whose SKIP is set has just been cleared, and one whose CURRENT is -1 has no request
    left: their actions are ignored and earn 0. What was asked is used up: it is NaN afterwards.

    Returns:
        The first copy whose action names no replica; -1 if none. Nothing is changed otherwise.
    """
    num = fleet.replica_params.shape[1]
    for copy in range(fleet.state.shape[0]):
        waits = not fleet.clock[copy, lay.SKIP] and fleet.clock[copy, lay.CURRENT] >= 0.0
        if waits and not 0 <= actions[copy] < num:
            return copy
    for copy in range(fleet.state.shape[0]):
        clock = fleet.clock[copy]
        rewards[copy] = 0.0
        if clock[lay.SKIP]:
            clock[lay.SKIP] = 0.0
        elif clock[lay.CURRENT] >= 0.0:
            key_row = fleet.asked[copy]
            key = key_row[KEY_S], key_row[LATE_AT_S], key_row[LATE_KEY_S]
            if math.isnan(key_row[KEY_S]):
                request = fleet.requests[copy, int(clock[lay.CURRENT])]
                key = asked_key(fleet.order, request, fleet.tables[copy, actions[copy]])
            rewards[copy] = place(fleet, copy, actions[copy], key)
            find_decision(fleet, copy)
            rewards[copy] += _collect(fleet, copy)
        fleet.asked[copy] = LAST
        fill_table(fleet, copy)
        if not is_first_come(fleet.order) and fleet.clock[copy, lay.CURRENT] >= 0.0:
            fill_places(fleet, copy, fleet.order)
    return -1


@compiled
def observe(fleet, mean_total_tokens, slo_s, observations):
    """Encode what the router sees in every copy; return how many numbers hit the bound.

    With `mean_total_tokens` above 0, what a rule's costs are made from comes last.
    """
    saturated = 0
    for copy in range(fleet.state.shape[0]):
        request = fleet.requests[copy, max(int(fleet.clock[copy, lay.CURRENT]), 0)]
        saturated += encode_shown(
            request[lay.FEATURES:], request[lay.CONTEXT], request[lay.PREDICTED_OUTPUT],
            fleet.tables[copy], True, mean_total_tokens, slo_s, observations[copy],
        )  # fmt: skip
    return saturated


@compiled
def step_and_observe(fleet, actions, rewards, mean_total_tokens, slo_s, observations):
    """`step`, then `observe`, in one call; return the results of both."""
    wrong = step(fleet, actions, rewards)
    if wrong >= 0:
        return wrong, 0
    return wrong, observe(fleet, mean_total_tokens, slo_s, observations)


@compiled
def drain(fleet, rewards):
    """Let every copy whose requests are all placed finish what it holds; fill in what it earns."""
    for copy in range(fleet.state.shape[0]):
        for server in range(fleet.replica_params.shape[1]):
            advance(replica_of(fleet, copy, server), math.inf)
        rewards[copy] = _collect(fleet, copy)


@compiled
def run_residual(fleet, player, order, rewards):
    """Run every copy's whole stream under the policy, from empty to drained."""
    looks = looks_at_queues(player.correction.weights)
    looks = looks and not is_first_come(order)
    for copy in range(fleet.state.shape[0]):
        clear(fleet, copy)
        while fleet.clock[copy, lay.CURRENT] >= 0.0:
            fill_table(fleet, copy)
            if looks:
                fill_places(fleet, copy, order)
            request = fleet.requests[copy, int(fleet.clock[copy, lay.CURRENT])]
            server = residual_scores(
                player, request[lay.FEATURES:], request[lay.CONTEXT],
                request[lay.PREDICTED_OUTPUT], fleet.tables[copy],
            )  # fmt: skip
            place(fleet, copy, server, asked_key(order, request, fleet.tables[copy, server]))
            find_decision(fleet, copy)
    drain(fleet, rewards)
