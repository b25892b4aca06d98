"""The token-level cluster as compiled functions that step many independent copies at once.

Everything that moves lives in a few float64 arrays, so that one call costs little and a copy is
a slice. `tokenyard.routing.simulator.constant_rate.ClusterSim` owns the arrays and gives them
names.

Shapes: C copies, S servers, R requests per stream.

    params    (S, NUM_PARAMS)      what a server is; never changes
    rules     (NUM_RULES,)         what happens at a full queue, and what is paid
    state     (C, S, STATE + 5 M + Q)  what a server holds; M = most requests that run at once,
                                   Q = queue limit. After the scalars come five blocks of M
                                   (request, start and finish of each running request; when
                                   each slot gets free; scratch), then the ring of those that
                                   wait, in the order in which they start.
    clock     (C, NUM_CLOCK)       now, index of the request to place, whether to skip one action,
                                   whether keys other than the time were given
    requests  (C, R, NUM_REQUEST)  the streams
    outcomes  (C, R, NUM_OUTCOME)  what became of each request
    tables    (C, S, NUM_COLUMNS)  what the router may know (`tokenyard.routing.observation`)
    asked     (C, NUM_ASKED)       places of the next requests in the waiting queues (`order`)
    order     (NUM_ORDER_WEIGHTS,) by what those wait of whom nothing is asked
              (`tokenyard.routing.scores.order`)
    ahead_row, ahead_outcomes      a row of `state` and the outcomes of one copy, where what a
                                   server holds is played out

Order at one instant: completions, then starts of waiting requests, then the decision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing import observation as ob
from tokenyard.routing.scores.linear import encode_shown, looks_at_queues
from tokenyard.routing.scores.order import is_first_come, order_key
from tokenyard.routing.scores.places import fill_place
from tokenyard.routing.scores.residual import residual_scores
from tokenyard.routing.scores.waiting_key import KEY_S, LAST, LATE_AT_S, LATE_KEY_S, bounded_key
from tokenyard.routing.simulator import rewards as pay
from tokenyard.types import FloatArray

# params
SLOT_TOKENS_PER_S, SLOTS, CONCURRENCY, NOMINAL_TOKENS_PER_S, RANK, NUM_PARAMS = range(6)

# rules: rewards (`rewards`), then dynamics and what else is paid
(
    QUEUE_LIMIT, DROP_AT_CAPACITY, SHARING, MAX_RUNNING, SLO_S, PROCESSING, QUEUE, OVERLOAD,
    BALANCE, MAX_OVERTAKING_S, PAYS_RESPONSES, NUM_RULES,
) = range(pay.NUM_REWARDS, pay.NUM_REWARDS + 12)  # fmt: skip

# state
(
    RUNNING, WAITING, HEAD, TOKENS, PREDICTED, PREDICTED_WAITING, RECENT_RESPONSE_S,
    SHARED_UNTIL_S, STATE,
) = range(9)  # fmt: skip

# clock
NOW_S, INDEX, SKIP, IS_ORDERED, NUM_CLOCK = range(5)

# requests; the scaled features follow
DISPATCH_S, ARRIVAL_S, TRUE_TOTAL, PREDICTED_TOTAL, CONTEXT, FEATURES = range(6)
NUM_REQUEST = FEATURES + ob.NUM_REQUEST_FEATURES

# outcomes
(
    SERVER, RESPONSE_S, WAITING_SEEN, ORDER_KEY_S, LATE_FROM_S, LATE_ORDER_KEY_S, NUM_OUTCOME,
) = range(7)  # fmt: skip

BALANCE_EPSILON = 1e-8


class ClusterArrays(NamedTuple):
    """All arrays of all copies; see the head of this module."""

    params: FloatArray
    rules: FloatArray
    state: FloatArray
    clock: FloatArray
    requests: FloatArray
    outcomes: FloatArray
    tables: FloatArray
    asked: FloatArray
    order: FloatArray
    ahead_row: FloatArray
    ahead_outcomes: FloatArray


class ServerView(NamedTuple):
    """One server of one copy."""

    row: FloatArray
    params: FloatArray
    rules: FloatArray
    requests: FloatArray
    outcomes: FloatArray


@compiled_inline
def _server_of(cluster, copy, server):
    """One server of one copy, whose arrays are views."""
    return ServerView(
        cluster.state[copy, server], cluster.params[server], cluster.rules,
        cluster.requests[copy], cluster.outcomes[copy],
    )  # fmt: skip


@compiled
def clear(cluster, copy):
    """Empty one copy and put its clock at its first request."""
    first_s = cluster.requests[copy, 0, DISPATCH_S]
    cluster.state[copy] = 0.0
    cluster.state[copy, :, RECENT_RESPONSE_S] = math.nan
    cluster.state[copy, :, SHARED_UNTIL_S] = first_s
    cluster.clock[copy, NOW_S] = first_s
    cluster.clock[copy, INDEX] = 0.0
    cluster.clock[copy, IS_ORDERED] = 0.0
    cluster.outcomes[copy, :, SERVER] = -1.0
    cluster.outcomes[copy, :, RESPONSE_S] = math.nan
    cluster.outcomes[copy, :, WAITING_SEEN:] = 0.0


@compiled
def _argmin(values):
    """Index of the smallest value, the first of equals."""
    best = 0
    for other in range(1, values.shape[0]):
        if values[other] < values[best]:
            best = other
    return best


@compiled_inline
def _start(server, slot, index, now):
    """Let request `index` run in place `slot` from now on."""
    row = server.row
    most = int(server.rules[MAX_RUNNING])
    row[STATE + slot] = index
    row[STATE + most + slot] = now
    total = server.requests[index, TRUE_TOTAL]
    # Under sharing the finish is not known: the tokens that are left stand in its place.
    finish = total if server.rules[SHARING] else now + total / server.params[SLOT_TOKENS_PER_S]
    row[STATE + 2 * most + slot] = finish


@compiled_inline
def _enqueue(server, index, key):
    """Let a request wait by its key (`order.bounded_key`), of equal ones by who came first."""
    row, outcomes = server.row, server.outcomes
    outcomes[index, ORDER_KEY_S] = key[KEY_S]
    outcomes[index, LATE_FROM_S] = key[LATE_AT_S]
    outcomes[index, LATE_ORDER_KEY_S] = key[LATE_KEY_S]
    ring = row[STATE + 5 * int(server.rules[MAX_RUNNING]) :]
    size = ring.shape[0]
    at = (int(row[HEAD]) + int(row[WAITING])) % size
    for _ in range(int(row[WAITING])):
        before = at - 1 if at > 0 else size - 1
        theirs = outcomes[int(ring[before]), ORDER_KEY_S]
        if theirs < key[KEY_S] or (theirs == key[KEY_S] and ring[before] < index):
            break
        ring[at] = ring[before]
        at = before
    ring[at] = index
    row[WAITING] += 1.0


@compiled
def _dequeue(row, ring):
    """Take the head off the ring."""
    head = int(row[HEAD])
    row[HEAD] = (head + 1) % ring.shape[0]
    row[WAITING] -= 1.0
    return int(ring[head])


@compiled
def _advance_server(server, until):
    """Run one server up to and including `until`.

    Returns:
        Completions, SLO violations, and what all responses are worth (`pay.response_reward`).
    """
    row, params, rules, requests, outcomes = server
    most = int(rules[MAX_RUNNING])
    finish = row[STATE + 2 * most : STATE + 3 * most]
    ring = row[STATE + 5 * most :]
    sharing = rules[SHARING] != 0.0
    completed = 0
    violated = 0
    earned = 0.0
    while row[RUNNING] > 0.0:
        running = int(row[RUNNING])
        slot = 0
        for other in range(1, running):
            earlier = finish[other] < finish[slot]
            # Of requests that finish at one instant the one that came first completes first.
            tie = finish[other] == finish[slot] and row[STATE + other] < row[STATE + slot]
            if earlier or tie:
                slot = other
        now = finish[slot]
        if sharing:
            now = row[SHARED_UNTIL_S] + finish[slot] * running / params[SLOT_TOKENS_PER_S]
        if now > until:
            break
        if sharing:
            served = finish[slot]
            for other in range(running):
                finish[other] -= served
            row[SHARED_UNTIL_S] = now
        index = int(row[STATE + slot])
        response = now - requests[index, ARRIVAL_S]
        outcomes[index, RESPONSE_S] = response
        if rules[PAYS_RESPONSES] != 0.0:
            earned += pay.response_reward(rules, response, rules[SLO_S])
        completed += 1
        if response > rules[SLO_S]:
            violated += 1
        row[RECENT_RESPONSE_S] = ob.recent_mean_s(row[RECENT_RESPONSE_S], response)
        row[TOKENS] -= requests[index, TRUE_TOTAL]
        row[PREDICTED] -= requests[index, PREDICTED_TOTAL]
        if row[WAITING] > 0.0:
            waiting = _dequeue(row, ring)
            # Keys only grow: the head is the right one where it is not late, or was set back.
            while outcomes[waiting, LATE_FROM_S] < now:
                back = outcomes[waiting, LATE_ORDER_KEY_S], math.inf, math.inf
                _enqueue(server, waiting, back)
                waiting = _dequeue(row, ring)
            row[PREDICTED_WAITING] -= requests[waiting, PREDICTED_TOTAL]
            _start(server, slot, waiting, now)
        else:
            last = running - 1
            for block in range(3):
                row[STATE + block * most + slot] = row[STATE + block * most + last]
            row[RUNNING] -= 1.0
            # No drift: what an empty server holds is exactly nothing.
            row[PREDICTED_WAITING] = 0.0
            if last == 0:
                row[TOKENS] = 0.0
                row[PREDICTED] = 0.0
    if sharing and row[RUNNING] > 0.0:
        served = (until - row[SHARED_UNTIL_S]) * params[SLOT_TOKENS_PER_S] / row[RUNNING]
        for other in range(int(row[RUNNING])):
            # Rounding must not leave less than nothing: the clock would go back.
            finish[other] = max(finish[other] - served, 0.0)
    if sharing and until < math.inf:
        row[SHARED_UNTIL_S] = until
    return completed, violated, earned


@compiled
def _played_out(cluster, server):
    """What the responses to all that a server holds will be worth, as if nothing more came.

    `ahead_outcomes` has the outcome of each then. The empty places of the queue are not copied.
    """
    row, played, theirs = server.row, cluster.ahead_row, cluster.ahead_outcomes
    ring_at = STATE + 5 * int(cluster.rules[MAX_RUNNING])
    for place in range(ring_at):
        played[place] = row[place]
    for number in range(int(row[WAITING])):
        place = ring_at + (int(row[HEAD]) + number) % (row.shape[0] - ring_at)
        played[place] = row[place]
        for column in range(NUM_OUTCOME):
            theirs[int(row[place]), column] = server.outcomes[int(row[place]), column]
    ahead = ServerView(played, server.params, server.rules, server.requests, theirs)
    return _advance_server(ahead, math.inf)[2]


@compiled_inline
def _place(cluster, copy, index, number, raw_key):
    """Give request `index` to the server of that number, which has been advanced to now.

    Where it has to wait, it waits by what is asked for (`bounded_key`).

    Returns:
        Whether it was accepted, and its response time in seconds if none goes before it that comes
        later (NaN where capacity is shared, or where it was dropped).
    """
    server, now = _server_of(cluster, copy, number), cluster.clock[copy, NOW_S]
    row, params, rules, requests, outcomes = server
    for other in range(cluster.params.shape[0]):
        outcomes[index, WAITING_SEEN] += cluster.state[copy, other, WAITING]
    running = int(row[RUNNING])
    waiting = int(row[WAITING])
    slots = int(params[SLOTS])
    full = waiting >= rules[QUEUE_LIMIT] and running >= slots
    if full or (rules[DROP_AT_CAPACITY] and running + waiting >= params[CONCURRENCY]):
        return False, math.nan
    outcomes[index, SERVER] = number
    row[TOKENS] += requests[index, TRUE_TOTAL]
    row[PREDICTED] += requests[index, PREDICTED_TOTAL]
    most = int(rules[MAX_RUNNING])
    if running < slots:
        _start(server, running, index, now)
        row[RUNNING] += 1.0
    else:
        key = bounded_key(raw_key, requests[index, ARRIVAL_S], now, rules[MAX_OVERTAKING_S])
        _enqueue(server, index, key)
        row[PREDICTED_WAITING] += requests[index, PREDICTED_TOTAL]
    if rules[SHARING]:
        return True, math.nan
    free = row[STATE + 3 * most : STATE + 3 * most + slots]
    slot = _argmin(free)
    free[slot] = max(free[slot], now) + requests[index, TRUE_TOTAL] / params[SLOT_TOKENS_PER_S]
    return True, free[slot] - requests[index, ARRIVAL_S]


@compiled
def _predicted_wait_s(server, now):
    """Time until a request placed now would start, by the sizes that the router knows."""
    row, params, rules, requests, _ = server
    running = int(row[RUNNING])
    slots = int(params[SLOTS])
    speed = params[SLOT_TOKENS_PER_S]
    most = int(rules[MAX_RUNNING])
    if rules[SHARING]:
        # Everything in the server delays a newcomer as if it were served before it.
        return row[PREDICTED] / speed
    if running < slots:
        return 0.0
    if slots == 1:
        index = int(row[STATE])
        left = requests[index, PREDICTED_TOTAL] / speed - (now - row[STATE + most])
        return max(left, 0.0) + max(row[PREDICTED_WAITING], 0.0) / speed
    free = row[STATE + 4 * most : STATE + 4 * most + slots]
    for slot in range(slots):
        index = int(row[STATE + slot])
        left = requests[index, PREDICTED_TOTAL] / speed - (now - row[STATE + most + slot])
        free[slot] = max(left, 0.0)
    ring = row[STATE + 5 * most :]
    for ahead in range(int(row[WAITING])):
        index = int(ring[(int(row[HEAD]) + ahead) % ring.shape[0]])
        free[_argmin(free)] += requests[index, PREDICTED_TOTAL] / speed
    return free[_argmin(free)]


@compiled_inline
def fill_table(cluster, copy):
    """Write what the router may know of one copy's servers."""
    now = cluster.clock[copy, NOW_S]
    for number in range(cluster.params.shape[0]):
        server = _server_of(cluster, copy, number)
        row, params = server.row, server.params
        out = cluster.tables[copy, number]
        out[ob.TOKENS_PER_S] = params[SLOT_TOKENS_PER_S]
        out[ob.NUM_SLOTS] = params[SLOTS]
        out[ob.MAX_CONCURRENCY] = params[CONCURRENCY]
        out[ob.NUM_WAITING] = row[WAITING]
        out[ob.NUM_RUNNING] = row[RUNNING]
        out[ob.TOKENS_IN_FLIGHT] = max(row[PREDICTED], 0.0)
        out[ob.WAIT_S] = _predicted_wait_s(server, now)
        out[ob.MEAN_RESPONSE_S] = row[RECENT_RESPONSE_S]
        out[ob.SPEED_RANK] = params[RANK]
        out[ob.ROUTABLE] = 1.0
        out[ob.OVERTAKEN_S] = 0.0
        out[ob.NUM_BEFORE] = 0.0
        out[ob.NUM_BEHIND] = 0.0


@compiled
def _balance(state, params):
    """Balance metric of the paper: 1 - std(loads) / (mean(loads) + epsilon)."""
    num = params.shape[0]
    total = 0.0
    squares = 0.0
    for server in range(num):
        load = state[server, TOKENS] / (
            params[server, NOMINAL_TOKENS_PER_S] * params[server, CONCURRENCY]
        )
        total += load
        squares += load * load
    mean = total / num
    return 1.0 - math.sqrt(max(squares / num - mean * mean, 0.0)) / (mean + BALANCE_EPSILON)


@compiled_inline
def _decide(cluster, copy, index, number, raw_key):
    """Place one request and return the reward terms that are due at the decision.

    Where keys order queues, what the server holds is played to its end with it and without it.
    """
    rules = cluster.rules
    server = _server_of(cluster, copy, number)
    row, params = server.row, server.params
    looks = rules[PAYS_RESPONSES] != 0.0 and cluster.clock[copy, IS_ORDERED] != 0.0
    before = 0.0
    if looks:
        before = _played_out(cluster, server)
    reward = rules[QUEUE] * row[WAITING]
    reward += rules[PROCESSING] * server.requests[index, TRUE_TOTAL] / params[SLOT_TOKENS_PER_S]
    if row[RUNNING] + row[WAITING] >= params[CONCURRENCY]:
        reward += rules[OVERLOAD]
    accepted, response = _place(cluster, copy, index, number, raw_key)
    reward += rules[pay.ACCEPT] if accepted else rules[pay.DROP]
    if rules[BALANCE] != 0.0:
        reward += rules[BALANCE] * _balance(cluster.state[copy], cluster.params)
    if rules[PAYS_RESPONSES] and accepted:
        if looks:
            reward += _played_out(cluster, server) - before
        else:
            reward += pay.response_reward(rules, response, rules[SLO_S])
    return reward


@compiled_inline
def _advance(cluster, copy, until):
    """Run one copy's servers up to `until`; return the reward terms due at completions."""
    completed = 0
    violated = 0
    for number in range(cluster.params.shape[0]):
        done, violations, _ = _advance_server(_server_of(cluster, copy, number), until)
        completed += done
        violated += violations
    return cluster.rules[pay.COMPLETE] * completed + cluster.rules[pay.SLO_AT_COMPLETION] * violated


@compiled
def _asked_key(order, rules, request, seen):
    """What an order asks for at a server (`scores.order.order_key`); first come asks for none."""
    if is_first_come(order):
        return LAST
    output = request[PREDICTED_TOTAL] - request[CONTEXT]
    return order_key(order, request[ARRIVAL_S], rules[SLO_S], request[CONTEXT], output, 0.0, seen)


@compiled
def step(cluster, actions, rewards):
    """Place the waiting request of every copy and run to the moment of the next decision.

    What is `asked` is used up: it is NaN afterwards.

    A copy whose SKIP is set has just been cleared: its action is ignored and earns 0. The last
    request of a stream can be seen but its successor cannot: place it, then `drain`.

    Returns:
        The first copy whose action names no server, or whose stream is over; -1 if none.
        Nothing is changed in that case.
    """
    rules, num_requests = cluster.rules, cluster.requests.shape[1]
    for copy in range(cluster.state.shape[0]):
        clock = cluster.clock[copy]
        over = clock[INDEX] >= num_requests
        if not clock[SKIP] and (over or not 0 <= actions[copy] < cluster.params.shape[0]):
            return copy
    for copy in range(cluster.state.shape[0]):
        clock = cluster.clock[copy]
        rewards[copy] = 0.0
        if clock[SKIP]:
            clock[SKIP] = 0.0
        else:
            index = int(clock[INDEX])
            request, key_row = cluster.requests[copy, index], cluster.asked[copy]
            key = key_row[KEY_S], key_row[LATE_AT_S], key_row[LATE_KEY_S]
            if math.isnan(key[KEY_S]):
                key = _asked_key(cluster.order, rules, request, cluster.tables[copy, actions[copy]])
            if not math.isnan(key[KEY_S]):
                clock[IS_ORDERED] = 1.0
            rewards[copy] = _decide(cluster, copy, index, actions[copy], key)
            index += 1
            clock[INDEX] = index
            if index < num_requests:
                clock[NOW_S] = cluster.requests[copy, index, DISPATCH_S]
                rewards[copy] += _advance(cluster, copy, clock[NOW_S])
        cluster.asked[copy] = LAST
        fill_table(cluster, copy)
    return -1


@compiled
def observe(cluster, mean_total_tokens, slo_s, observations):
    """Encode what the router sees in every copy; return how many numbers hit the bound.

    With `mean_total_tokens` above 0 it sees everything, and what a rule's costs are made from;
    else what the paper's agents see.
    """
    saturated = 0
    for copy in range(cluster.tables.shape[0]):
        index = min(int(cluster.clock[copy, INDEX]), cluster.requests.shape[1] - 1)
        request = cluster.requests[copy, index]
        saturated += encode_shown(
            request[FEATURES:], request[CONTEXT], request[PREDICTED_TOTAL] - request[CONTEXT],
            cluster.tables[copy], mean_total_tokens > 0.0, mean_total_tokens, slo_s,
            observations[copy],
        )  # fmt: skip
    return saturated


@compiled
def step_and_observe(
    params, rules, state, clock, requests, outcomes, tables, asked, order, ahead_row,
    ahead_outcomes, actions, rewards, mean_total_tokens, slo_s, observations,
):  # fmt: skip
    """`step`, then `observe`, in one call; return the results of both.

    It takes the arrays one by one: at every call numba asks for the types in a tuple anew.
    """
    cluster = ClusterArrays(params, rules, state, clock, requests, outcomes, tables, asked, order,
                            ahead_row, ahead_outcomes)  # fmt: skip
    wrong = step(cluster, actions, rewards)
    if wrong >= 0:
        return wrong, 0
    return wrong, observe(cluster, mean_total_tokens, slo_s, observations)


@compiled
def drain(cluster, rewards):
    """Let every copy finish what it holds; fill in what that earns."""
    for copy in range(cluster.state.shape[0]):
        rewards[copy] = _advance(cluster, copy, math.inf)


@compiled_inline
def _fill_places(cluster, copy, index, order):
    """Write where a request would stand in each queue (`policies.places`)."""
    requests, outcomes = cluster.requests[copy], cluster.outcomes[copy]
    for server in range(cluster.params.shape[0]):
        row, seen = cluster.state[copy, server], cluster.tables[copy, server]
        waiting = int(row[WAITING])
        if waiting == 0:
            continue
        ring = row[STATE + 5 * int(cluster.rules[MAX_RUNNING]) :]
        key_s = _asked_key(order, cluster.rules, requests[index], seen)[KEY_S]
        tokens = 0.0
        behind = 0
        for place in range(waiting - 1, -1, -1):
            other = int(ring[(int(row[HEAD]) + place) % ring.shape[0]])
            if outcomes[other, ORDER_KEY_S] <= key_s:
                break
            tokens += requests[other, PREDICTED_TOTAL]
            behind += 1
        fill_place(seen, waiting - behind, behind, tokens)


@compiled_inline
def _arrive(cluster, copy, index):
    """Run one copy to a request of its stream, and show what the router may know then."""
    now = cluster.requests[copy, index, DISPATCH_S]
    cluster.clock[copy, NOW_S] = now
    _advance(cluster, copy, now)
    fill_table(cluster, copy)


@compiled_inline
def _place_by(cluster, copy, index, number, order):
    """Place a request where it waits by an order, in a run that earns nothing."""
    request, seen = cluster.requests[copy, index], cluster.tables[copy, number]
    _place(cluster, copy, index, number, _asked_key(order, cluster.rules, request, seen))


@compiled
def run_residual(cluster, player, order, rewards):
    """Run every copy's whole stream under `residual_scores`, from empty to drained."""
    looks = looks_at_queues(player.correction.weights) and not is_first_come(order)
    for copy in range(cluster.state.shape[0]):
        clear(cluster, copy)
        for index in range(cluster.requests.shape[1]):
            _arrive(cluster, copy, index)
            if looks:
                _fill_places(cluster, copy, index, order)
            request = cluster.requests[copy, index]
            server = residual_scores(
                player, request[FEATURES:], request[CONTEXT],
                request[PREDICTED_TOTAL] - request[CONTEXT], cluster.tables[copy],
            )  # fmt: skip
            _place_by(cluster, copy, index, server, order)
    drain(cluster, rewards)


@compiled
def _delay_rule(reserve_above_tokens, dump_server, slo_s, size_tokens, table):
    """Server that shortest expected delay or one of its variants chooses (`policies.delay`)."""
    slowest = 0
    for server in range(table.shape[0]):
        if table[server, ob.TOKENS_PER_S] < table[slowest, ob.TOKENS_PER_S]:
            slowest = server
    best, best_s = 0, math.inf
    for server in range(table.shape[0]):
        finish_s = table[server, ob.WAIT_S] + size_tokens / table[server, ob.TOKENS_PER_S]
        if server == slowest and size_tokens > reserve_above_tokens and table.shape[0] > 1:
            continue
        if finish_s < best_s:
            best, best_s = server, finish_s
    return dump_server if dump_server >= 0 and best_s > slo_s else best


@compiled
def run_delay_rule(cluster, reserve_above_tokens, dump_server, order, rewards):
    """Run every copy's whole stream under shortest expected delay or one of its variants."""
    for copy in range(cluster.state.shape[0]):
        clear(cluster, copy)
        for index in range(cluster.requests.shape[1]):
            _arrive(cluster, copy, index)
            server = _delay_rule(
                reserve_above_tokens, dump_server, cluster.rules[SLO_S],
                cluster.requests[copy, index, PREDICTED_TOTAL], cluster.tables[copy],
            )  # fmt: skip
            _place_by(cluster, copy, index, server, order)
    drain(cluster, rewards)
