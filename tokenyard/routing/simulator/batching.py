"""A fleet of replicas that batch continuously: names and shapes for the arrays of its kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from tokenyard import metrics
from tokenyard.routing import observation
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.scenario import RewardWeights, Scenario
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel import step as kernel
from tokenyard.routing.simulator.batching_kernel.prompts import prompt_blocks
from tokenyard.routing.simulator.batching_params import fleet_rules, ranks, replica_params
from tokenyard.routing.simulator.batching_streams import Stream, fleet_stream
from tokenyard.routing.simulator.constant_rate import Outcomes
from tokenyard.routing.simulator.copies import ServerCopies
from tokenyard.routing.simulator.table import TableSnapshots
from tokenyard.routing.types import Request, WaitingQueue
from tokenyard.types import BoolArray, FloatArray, IntArray

_EQUALLY_LONG = ("turns", "factors")
"""Arrays whose length does not differ between the streams of a scenario."""


@dataclass(frozen=True)
class BatchingOutcomes(Outcomes):
    """What became of the requests of one stream; every array has shape (num_requests,)."""

    first_token_s: FloatArray
    """Time from arrival to the first token, seconds; NaN where there was none."""
    output_tokens: FloatArray
    met: IntArray
    """1 where every SLO of the request's class was attained."""
    traffic_class: IntArray
    tenant: IntArray
    attempts: FloatArray
    """Times that the request was placed."""
    preemptions: FloatArray
    hit_tokens: FloatArray
    """Tokens that the prefix cache had at admission, over all admissions."""
    prefilled_tokens: FloatArray
    """Tokens that were lacking in KV memory at admission, over all admissions."""
    wasted_tokens: FloatArray
    """Generated tokens that reached nobody: the client hung up, or the replica failed."""
    kv_seen: FloatArray
    """Mean over replicas of the share of KV memory that requests held when this one was placed."""
    gave_up: IntArray
    """1 where the client hung up, or the request waited too long."""
    latency_counts: FloatArray
    """Gaps between the tokens of a request, counted by bin over the whole stream, shape
    (lay.LATENCY_BINS,)."""
    energy_j: float
    """Of all replicas that are up, from the first arrival to the last completion."""
    of_whole_stream = frozenset({"latency_counts"})

    def after(self, warm_up: int) -> Self:
        """Without the first requests; energy is that of as many tokens, gaps are those of all."""
        kept = super().after(warm_up)
        share = metrics.fraction(kept.output_tokens.sum(), self.output_tokens.sum())
        return replace(kept, energy_j=share * self.energy_j)

    def violations(self, slo_response_s: float) -> BoolArray:
        """Which requests violated an SLO of their class, shape (num_requests,)."""
        violations: BoolArray = self.met == 0
        return violations

    @classmethod
    def of(cls, outcomes: Outcomes) -> BatchingOutcomes:
        """The outcomes, which are those of a fleet.

        Raises:
            TypeError: They are of other servers.
        """
        if not isinstance(outcomes, cls):
            raise TypeError("only replicas that batch have tokens, memory and energy")
        return outcomes

    @property
    def tpot_s(self) -> FloatArray:
        """Mean time per output token after the first, seconds; NaN for fewer than two tokens."""
        return metrics.tpot_s(self.response_s, self.first_token_s, self.output_tokens)

    def further_measures(self, scenario: Scenario) -> dict[str, float]:
        """Tokens, memory, energy, classes and tenants; docs/metrics.md defines every key."""
        done = ~np.isnan(self.response_s)
        delivered, wasted = self.output_tokens[done].sum(), self.wasted_tokens.sum()
        hit = self.hit_tokens.sum()
        ttft_s = metrics.offered_s(self.first_token_s, self.arrival_s, self.response_s)
        return {
            "mean_ttft_s": metrics.mean(ttft_s),
            "p50_ttft_s": metrics.percentile(ttft_s, 50),
            "p99_ttft_s": metrics.percentile(ttft_s, 99),
            "mean_tpot_s": metrics.mean(self.tpot_s),
            "p99_tpot_s": metrics.percentile(self.tpot_s, 99),
            "p50_itl_s": _itl_s(self, 50),
            "p99_itl_s": _itl_s(self, 99),
            "kv_used_fraction": metrics.mean(self.kv_seen),
            "prefix_hit_fraction": metrics.fraction(hit, hit + self.prefilled_tokens.sum()),
            "preemptions_per_request": metrics.mean(self.preemptions),
            "wasted_tokens_fraction": metrics.fraction(wasted, wasted + delivered),
            "energy_j_per_token": metrics.fraction(self.energy_j, delivered),
            "retried_fraction": float((self.attempts > 1).mean()),
            "gave_up_fraction": float(self.gave_up.mean()),
            **_of_groups(scenario, self),
        }


def _itl_s(outcomes: BatchingOutcomes, percent: float) -> float:
    return metrics.binned_percentile_s(
        outcomes.latency_counts, percent, lay.LATENCY_BIN_START_S, lay.LATENCY_BINS_PER_E
    )


def _of_groups(scenario: Scenario, outcomes: BatchingOutcomes) -> dict[str, float]:
    """Measure SLO attainment by class and, if there are several, by tenant."""
    violations = outcomes.violations(scenario.slo_response_s)
    fractions = {
        f"attained_{traffic_class.name}_fraction": metrics.attained_fraction(
            violations, outcomes.traffic_class, which
        )
        for which, traffic_class in enumerate(scenario.required_fleet.classes)
    }
    tenants = scenario.required_fleet.tenants
    if len(tenants) == 1:
        return fractions
    for which, tenant in enumerate(tenants):
        key = f"attained_tenant_{tenant.name}_fraction"
        fractions[key] = metrics.attained_fraction(violations, outcomes.tenant, which)
    gaps = metrics.service_gaps_tokens_per_s(
        outcomes.arrival_s,
        outcomes.first_token_s,
        outcomes.response_s,
        np.stack([outcomes.context_tokens, outcomes.output_tokens], axis=1),
        outcomes.tenant,
        np.array([tenant.weight for tenant in tenants]),
    )
    return fractions | {
        "service_gap_tokens_per_s": metrics.mean(gaps),
        "max_service_gap_tokens_per_s": float(gaps.max()) if len(gaps) else np.nan,
    }


class BatchingSim(ServerCopies):
    """Independent copies of one fleet; docs/engine.md says what a replica does."""

    functions: ClassVar[Any] = kernel
    skip_at, placed_at = lay.SKIP, lay.PLACED
    server_word = "replica"
    arrays: lay.FleetArrays

    def __init__(
        self,
        scenario: Scenario,
        num_copies: int,
        stream_length: int,
        reward: RewardWeights | None = None,
    ) -> None:
        """Make empty replicas; `load` a stream into every copy before the first `step`.

        Args:
            scenario: Fleet, SLO and, unless `reward` is given, reward weights.
            num_copies: Copies stepped by one call.
            stream_length: Requests in every stream.
            reward: Weights that take the place of the scenario's.
        """
        super().__init__(scenario, num_copies, whole=True)
        fleet = scenario.required_fleet
        num = scenario.num_servers
        self._params = replica_params(fleet, scenario.server_capacities_tokens_per_s)
        rules = fleet_rules(fleet, reward or scenario.reward, stream_length)
        rules[lay.MAX_OVERTAKING_S] = scenario.max_overtaking_s
        width = int(rules[lay.RING_AT]) + 2 + lay.WAITING_FIELDS * int(rules[lay.RING_SIZE])
        routers = fleet.num_routers
        self.arrays = lay.FleetArrays(
            replica_params=np.tile(self._params, (num_copies, 1, 1)),
            rules=rules,
            events=np.zeros((num_copies, 0, lay.NUM_EVENT)),
            requests=np.zeros((num_copies, stream_length, lay.NUM_REQUEST)),
            chains=np.zeros((num_copies, 0), dtype=np.int64),
            state=np.zeros((num_copies, num, width)),
            links=np.zeros((num_copies, num, lay.NUM_LINKS, 1), dtype=np.int32),
            cached=np.zeros((num_copies, -(-num // lay.REPLICAS_PER_WORD), 1), dtype=np.int64),
            block_s=np.zeros((num_copies, num, lay.SENT_S + routers, 1)),
            routers=np.zeros((num_copies, routers, num, lay.NUM_OWN)),
            clock=np.zeros((num_copies, lay.NUM_CLOCK)),
            retries=np.zeros((num_copies, stream_length), dtype=np.int64),
            turns=np.zeros((num_copies, 0, lay.NUM_TURN)),
            pending=np.zeros((num_copies, 0), dtype=np.int64),
            factors=np.zeros((num_copies, num, 0)),
            outcomes=np.zeros((num_copies, stream_length, lay.NUM_OUTCOME)),
            latencies=np.zeros((num_copies, lay.LATENCY_BINS)),
            tables=np.zeros((num_copies, num, observation.NUM_COLUMNS)),
            asked=self.asked,
            order=self._order,
            scratch=np.zeros(width),
        )
        self.step_arguments = (self.arrays,)
        total = sum(tenant.weight for tenant in fleet.tenants)
        self.tenants = [(tenant.name, tenant.weight / total) for tenant in fleet.tenants]

    def load(self, copy: int, stream: Stream) -> None:
        """Empty one copy and give it a stream of `stream_length` requests."""
        stream = fleet_stream(stream)
        # The length of some arrays depends on the stream.
        clients = lay.PENDING_AT + stream.num_clients if stream.num_clients else 0
        for name, axis, needed, fill in (
            ("chains", 1, len(stream.chains), 0),
            ("events", 1, len(stream.events), np.inf),
            ("links", 3, stream.num_blocks + 1, 0),
            ("cached", 2, stream.num_blocks + 1, 0),
            ("block_s", 3, stream.num_blocks + 1, -np.inf),
            ("turns", 1, len(stream.turns), 0),
            ("pending", 1, clients, 0),
            ("factors", 2, stream.factors.shape[1], 1),
        ):
            old = getattr(self.arrays, name)
            missing = needed - old.shape[axis]
            if missing <= 0:
                continue
            pad = [(0, 0)] * old.ndim
            # A little more than is needed: the next streams are about as long.
            pad[axis] = (0, missing + (0 if name in _EQUALLY_LONG else needed // 8))
            longer = np.pad(old, pad, constant_values=fill)
            self.arrays = self.arrays._replace(**{name: longer})
        arrays = self.arrays
        self.step_arguments = (arrays,)
        arrays.requests[copy] = stream.requests
        arrays.turns[copy, : len(stream.turns)] = stream.turns
        arrays.factors[copy] = stream.factors
        if arrays.pending.shape[1]:
            arrays.pending[copy, lay.PENDING_CLIENTS] = stream.num_clients
        arrays.chains[copy, : len(stream.chains)] = stream.chains
        arrays.events[copy, :, lay.EVENT_S] = np.inf
        arrays.events[copy, : len(stream.events)] = stream.events
        self.clear(copy)

    def vary(self, copy: int, randomisation: Randomisation, rng: np.random.Generator) -> None:
        """Draw other hardware and staleness for one copy, which is emptied; until the next draw."""
        params = self.arrays.replica_params[copy]
        params[:] = self._params
        low, high = np.log(randomisation.speed_factor)
        factors = np.exp(rng.uniform(low, high, len(params)))
        params[:, lay.ITERATION_S : lay.KV_TOKEN_S + 1] /= factors[:, None]
        params[:, lay.TOKENS_PER_S] *= factors
        params[:, lay.RANK] = ranks(params)
        if randomisation.scrape_interval_s is not None:
            params[:, lay.SCRAPE_INTERVAL_S] = rng.uniform(*randomisation.scrape_interval_s)
        self.clear(copy)

    def sizes_seen(self) -> FloatArray:
        """Size of every request as the router knows it, tokens, shape (copies, stream_length)."""
        requests = self.arrays.requests
        sizes: FloatArray = requests[:, :, lay.CONTEXT] + requests[:, :, lay.PREDICTED_OUTPUT]
        return sizes

    def view(self, copy: int = 0) -> BatchingView:
        """One copy, to look at."""
        return BatchingView(self, copy)

    def undecided(self) -> bool:
        """Whether any copy has a request left to be placed."""
        return bool((self.arrays.clock[:, lay.CURRENT] >= 0).any())


class BatchingView(NamedTuple):
    """One copy of a simulator: what a policy may see of it now, and what became of its requests."""

    sim: BatchingSim
    copy: int

    def current(self) -> int:
        """Index of the request that waits to be placed; -1: none is left."""
        return int(self.sim.arrays.clock[self.copy, lay.CURRENT])

    def now_s(self) -> float:
        """Clock of one copy, seconds."""
        return float(self.sim.arrays.clock[self.copy, lay.NOW_S])

    def request(self) -> Request:
        """The request that waits to be placed, as a policy may see it."""
        row = self.sim.arrays.requests[self.copy, self.current()].tolist()
        context = row[lay.CONTEXT]
        tenant, tenant_share = self.sim.tenants[int(row[lay.TENANT])]
        return Request(
            arrival_s=row[lay.ARRIVAL_S],
            context_tokens=int(context),
            predicted_total_tokens=context + row[lay.PREDICTED_OUTPUT],
            due_s=min(row[lay.SLO_TTFT_S], row[lay.SLO_RESPONSE_S]),
            tenant=tenant,
            tenant_share=tenant_share,
            **self._of_session(),
        )

    def _of_session(self) -> dict[str, Any]:
        """What a request tells of its session."""
        turns = self.sim.arrays.turns[self.copy]
        if not len(turns):
            return {}
        row = turns[self.current()]
        return {"session_id": f"session-{int(row[lay.SESSION])}", "turn": int(row[lay.TURN])}

    def offered(self) -> list[int]:
        """Return the replicas that the router believes to take requests; all if there are none."""
        routable = self.sim.arrays.tables[self.copy, :, observation.ROUTABLE].tolist()
        return [i for i, flag in enumerate(routable) if flag] or [*range(len(routable))]

    def snapshots(self, block_tokens: int = 0) -> TableSnapshots:
        """What a policy may know now of the replicas that are `offered`.

        Args:
            block_tokens: Count the prompts in flight in blocks of so many tokens; 0: do not count.
        """
        offered, table = self.offered(), self.sim.arrays.tables[self.copy]
        blocks = self._prompt_blocks(block_tokens) if block_tokens else None
        return TableSnapshots(
            self.sim.names, table, offered, self.now_s(), True, block_tokens, blocks
        )

    def _prompt_blocks(self, block_tokens: int) -> FloatArray:
        """Blocks of the prompts in flight at every replica, shape (num_servers,)."""
        blocks = np.empty(self.sim.scenario.num_servers)
        marks = np.zeros(self.sim.arrays.links.shape[3], dtype=np.int64)
        prompt_blocks(self.sim.arrays, self.copy, float(block_tokens), marks, blocks)
        return blocks

    def queue(self, replica: int) -> WaitingQueue:
        """What waits at a replica of what the router of the current request sent there, in order.

        A router knows of its own requests which have not got a token; that the prompt of one is
        being computed already, it is assumed to know.
        """
        rules, requests = self.sim.arrays.rules, self.sim.arrays.requests[self.copy]
        row = self.sim.arrays.state[self.copy, replica, int(rules[lay.RING_AT]) :]
        places = int(row[0]) + np.arange(int(row[1]))
        ring = row[2:].reshape(-1, lay.WAITING_FIELDS)
        waiting = ring[places % len(ring)]
        which = waiting[:, lay.W_INDEX].astype(np.int64)
        current = requests[self.current()]
        keys_s = waiting[:, lay.W_KEY_S].copy()
        later = requests[which, lay.PRIORITY] - current[lay.PRIORITY]
        keys_s[later != 0] = np.inf * later[later != 0]
        own = requests[which, lay.ROUTER] == current[lay.ROUTER]
        return WaitingQueue(keys_s[own], requests[which[own], lay.CONTEXT])

    def best_ahead(self, others_weight: float) -> int:
        """Replica where the waiting request does best, seen from what no router knows.

        The cost is the request's own finish plus `others_weight` times the delay of all others,
        as if nothing more came.
        """
        return int(kernel.best_ahead(self.sim.arrays, self.copy, others_weight))

    def num_waiting(self) -> int:
        """Requests that wait at all replicas now."""
        return int(self.sim.arrays.state[self.copy, :, lay.WAITING].sum())

    def response_s(self, requests: IntArray) -> FloatArray:
        """Response times of requests, NaN until one is done, seconds, shape (num,)."""
        finish_s = self.sim.arrays.outcomes[self.copy, requests, lay.FINISH_S]
        return np.asarray(finish_s - self.sim.arrays.requests[self.copy, requests, lay.ARRIVAL_S])

    def outcomes(self) -> BatchingOutcomes:
        """What became of one copy's requests, in order of arrival."""
        requests, outcome = (
            self.sim.arrays.requests[self.copy],
            self.sim.arrays.outcomes[self.copy],
        )
        if self.sim.arrays.pending.shape[1]:
            order = np.lexsort((outcome[:, lay.SUBMITTED], requests[:, lay.ARRIVAL_S]))
            requests, outcome = requests[order], outcome[order]
        finish_s = outcome[:, lay.FINISH_S]
        arrival_s = requests[:, lay.ARRIVAL_S].copy()
        response_s = finish_s - arrival_s
        first_s = outcome[:, lay.FIRST_TOKEN_S] - arrival_s
        output = requests[:, lay.OUTPUT].copy()
        done = ~np.isnan(response_s)
        return BatchingOutcomes(
            arrival_s=arrival_s,
            total_tokens=requests[:, lay.CONTEXT] + output,
            server=outcome[:, lay.SERVER].astype(np.int64),
            response_s=response_s,
            waiting_seen=outcome[:, lay.WAITING_SEEN].copy(),
            first_token_s=first_s,
            output_tokens=output,
            context_tokens=requests[:, lay.CONTEXT].copy(),
            met=outcome[:, lay.MET].astype(np.int64),
            traffic_class=requests[:, lay.CLASS].astype(np.int64),
            tenant=requests[:, lay.TENANT].astype(np.int64),
            attempts=outcome[:, lay.ATTEMPTS].copy(),
            preemptions=outcome[:, lay.PREEMPTIONS].copy(),
            hit_tokens=outcome[:, lay.HIT_TOKENS].copy(),
            prefilled_tokens=outcome[:, lay.PREFILLED_TOKENS].copy(),
            wasted_tokens=outcome[:, lay.GENERATED] - np.where(done, output, 0.0),
            kv_seen=outcome[:, lay.KV_SEEN].copy(),
            gave_up=outcome[:, lay.GAVE_UP].astype(np.int64),
            latency_counts=self.sim.arrays.latencies[self.copy].copy(),
            energy_j=self._energy_j(finish_s),
        )

    def _energy_j(self, finish_s: FloatArray) -> float:
        arrays = self.sim.arrays
        first_s = float(arrays.requests[self.copy, 0, lay.ARRIVAL_S])
        end_s = float(np.nanmax(finish_s, initial=first_s))
        up_s = _up_s(arrays.events[self.copy], self.sim.scenario.num_servers, first_s, end_s)
        idle_j = up_s @ arrays.replica_params[self.copy, :, lay.IDLE_W]
        return float(idle_j + arrays.state[self.copy, :, lay.BUSY_J].sum())


def _up_s(events: FloatArray, num_replicas: int, first_s: float, end_s: float) -> FloatArray:
    """Time that each replica was up or draining between two instants, shape (num_replicas,)."""
    up_s = np.full(num_replicas, end_s - first_s)
    is_up = np.ones(num_replicas, dtype=np.bool_)
    # Streams of fewer events than others are filled up with ones that never happen.
    for at_s, replica, status in events[events[:, lay.EVENT_S] < np.inf]:
        which, now_up = int(replica), status != lay.DOWN
        if now_up != is_up[which]:
            left_s = end_s - min(max(at_s, first_s), end_s)
            up_s[which] += left_s if now_up else -left_s
            is_up[which] = now_up
    return up_s
