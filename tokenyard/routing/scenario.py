"""What is fixed in a routing experiment, as data: servers, traffic, visibility, SLO, reward.

Scenarios are YAML files in `tokenyard/scenarios`, read only through these models. A name is
resolved by `load_scenario`; a path to a YAML file of your own works in its place.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tokenyard.config import FrozenModel, fitted, read_fields, shipped_names
from tokenyard.routing.fleet import Fleet, requests_per_s
from tokenyard.types import Slo
from tokenyard.workload.diurnal import Diurnal
from tokenyard.workload.model import load_model
from tokenyard.workload.sessions import SessionMeans, Sessions, session_means

Discipline = Literal["serial", "parallel_full", "parallel_split", "processor_sharing"]
Visibility = Literal["oracle", "by_context", "none"]


class Server(FrozenModel):
    """One replica of the token-level cluster."""

    name: str
    tokens_per_s: Annotated[float, Field(gt=0)]
    """Nominal processing rate, tokens per second."""
    concurrency: Annotated[int, Field(ge=1)]
    """Waiting plus running requests from which on the server counts as at capacity."""


_AMOUNTS = ("rate_per_s", "load", "warm_load", "clients")
_SHORTEST_CYCLE_S = 1e-3


class Arrivals(FrozenModel):
    """When requests come. Exactly one of `rate_per_s`, `load`, `warm_load` and `clients` is given.

    A closed process has so many clients as would ask at that rate if every token of an answer took
    `Sessions.answer_token_s`.
    """

    process: Literal["poisson", "mmpp", "closed"] = "poisson"
    """`mmpp` uses the bursts of the workload model; `poisson` only its lengths. In `closed`, which
    needs `sessions`, every client waits for its answer and thinks before it asks again."""
    rate_per_s: Annotated[float, Field(gt=0)] | None = None
    load: Annotated[float, Field(gt=0, lt=2)] | None = None
    """Offered tokens per second as a share of what the servers can process."""
    warm_load: Annotated[float, Field(gt=0, lt=2)] | None = None
    """The same as if all that sessions repeat were cached; needs `sessions`."""
    clients: Annotated[int, Field(ge=1)] | None = None
    """Clients of a closed process."""
    diurnal: Diurnal | None = None
    """Day and week in the arrival rate; None: none, as in the one-hour public traces. Only without
    `sessions`."""

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        if sum(getattr(self, name) is not None for name in _AMOUNTS) != 1:
            raise ValueError(f"give exactly one of {', '.join(_AMOUNTS)}")
        if self.clients is not None and self.process != "closed":
            raise ValueError("clients are of a closed process; give a rate or a load")
        return self


class HeldOutTrace(FrozenModel):
    """The recorded requests that judge a policy, where the file is there."""

    name: Literal["azure_code", "azure_conv"]
    first: Annotated[int, Field(ge=1)]
    """Index of the first request used; those before it are training data, and all from it on are
    the test part. The time of the file is scaled to the load."""


class RewardWeights(FrozenModel):
    """Weights of every reward term; a term is `weight x quantity`, so penalties are negative.

    The first seven are the five terms and the SLO term of the paper (Abbaraju, section IV), at
    its printed values. The others credit the response time at the decision. A fleet knows no
    `processing`, `queue`, `overload` and `balance`, which must be 0 there.
    """

    processing: float = -0.01
    """Per second of the request's processing time at the chosen server (servers only)."""
    queue: float = -0.1
    """Per request waiting at the chosen server before the decision (servers only)."""
    overload: float = -10.0
    """When the chosen server is at capacity (servers only)."""
    balance: float = 0.1
    """Per unit of the balance metric 1 - std(loads) / (mean(loads) + 1e-8), after placement
    (servers only)."""
    accept: float = 1.0
    """When the request is accepted."""
    complete: float = 0.0
    """When a request completes; 1.0 is the reading that pays the base reward twice."""
    slo_at_completion: float = 0.0
    """When a request completes later than the SLO (the paper's high-load value is -5)."""
    drop: float = -10.0
    """When the request is dropped."""
    response: float = 0.0
    """Per second by which a placement lengthens response times, its own included."""
    slo: float = 0.0
    """Per SLO violation of a response that a placement adds, its own included."""
    tail: float = 0.0
    """Per second beyond `tail_after_s` that a placement adds to response times."""
    tail_after_s: Annotated[float, Field(ge=0)] = 6.0
    """Where the tail begins, seconds."""
    energy: float = 0.0
    """Per joule that the placement adds to what the chosen replica's work takes (fleets only)."""

    @property
    def credits_response(self) -> bool:
        """Whether any term needs the response time at the moment of the decision."""
        return self.response != 0 or self.slo != 0 or self.tail != 0


NO_REWARD = RewardWeights(processing=0, queue=0, overload=0, balance=0, accept=0, drop=0)
"""All-zero weights for runs whose reward is not used."""

_SERVER_TERMS = ("processing", "queue", "overload", "balance")
_FLEET_TERMS = ("energy",)
_OF_SERVERS: dict[str, object] = {"discipline": "serial", "queue_limit": 1000, "overflow": "queue"}
"""Fields of a scenario that say how servers work, and their defaults."""
ON = "@"
"""Between the name of a workload and that of the fleet that it plays on."""
_WORKLOADS, _FLEETS = "scenarios/workloads", "scenarios/fleets"


class Scenario(FrozenModel):
    """A routing problem: who serves, what arrives, what the router knows, what is paid."""

    name: str
    description: str
    problem: Literal["routing"] = "routing"
    servers: tuple[Server, ...] = ()
    """The token-level cluster; empty where there is a `fleet`."""
    fleet: Fleet | None = None
    """Replicas that batch continuously (docs/engine.md), in place of `servers`."""
    discipline: Discipline = "serial"
    """How a server works: `serial`, one request at a time at full speed; `parallel_full`,
    `concurrency` slots each at full speed; `parallel_split`, as many slots that divide the speed
    in fixed parts; `processor_sharing`, the speed is shared by those that run."""
    queue_limit: Annotated[int, Field(ge=1)] = 1000
    """Requests that may wait at one server; more are dropped."""
    overflow: Literal["queue", "drop"] = "queue"
    """What happens to a request sent to a server at capacity."""
    max_overtaking_s: Annotated[float, Field(ge=0)] = 120.0
    """Bound on what an order key adds to the time of submission, seconds: a request that waits can
    only be overtaken by those that arrive at most so much later, whatever a policy orders by."""
    workload: str = "azure_code"
    """Fitted workload model that training and synthetic test streams come from: the name of a
    shipped one, or the path of your own (.json)."""
    arrivals: Arrivals
    sessions: Sessions | None = None
    """Conversations with common prefixes in place of independent requests; arrivals are then
    Poisson in conversations, and only output lengths come from the workload model."""
    held_out_trace: HeldOutTrace | None = None
    requests_per_stream: Annotated[int, Field(ge=1)] = 5000
    decision_epoch_s: Annotated[float, Field(gt=0)] | None = None
    """Decide at multiples of this many seconds, in batches; None: at every arrival."""
    output_length: Visibility = "by_context"
    """What the router is told of the output length: the truth, a prediction, or nothing."""
    output_drift: Annotated[float, Field(gt=0)] = 1.0
    """Mean output of a stream's last request over that of its first; between them it moves evenly.
    The router's predictions stay. Only without `sessions`."""
    slo_response_s: Annotated[float, Field(gt=0)] = 2.0
    reward: RewardWeights = RewardWeights()

    @model_validator(mode="after")
    def _refuse_terms_of_others(self) -> Self:
        if bool(self.servers) == (self.fleet is not None):
            raise ValueError("give exactly one of servers and fleet")
        self.check_reward(self.reward)
        wrong = [name for name, default in _OF_SERVERS.items() if getattr(self, name) != default]
        if self.fleet and wrong:
            raise ValueError(f"{wrong} are of token-level servers; a fleet has its own queue_limit")
        if self.sessions and not (self.fleet and self.fleet.prefix_block_tokens):
            raise ValueError("sessions need a fleet with prefix_block_tokens above 0")
        if self.discipline == "processor_sharing" and self.reward.credits_response:
            raise ValueError(
                "under processor_sharing the response time depends on later arrivals: reward "
                "weights response, slo and tail must be 0; use slo_at_completion"
            )
        return self

    @model_validator(mode="after")
    def _refuse_what_sessions_decide(self) -> Self:
        of_sessions = self.arrivals.process == "closed" or self.arrivals.warm_load is not None
        if of_sessions and self.sessions is None:
            raise ValueError("a closed process and warm_load need sessions")
        if self.output_drift != 1.0 and self.sessions is not None:
            raise ValueError("output_drift is for traffic without sessions")
        if self.arrivals.diurnal is not None and self.sessions is not None:
            raise ValueError("diurnal is for traffic without sessions")
        if self.arrivals.process == "closed" and self.decision_epoch_s is not None:
            raise ValueError("a closed process is decided at every arrival: no decision_epoch_s")
        return self

    @property
    def pays(self) -> bool:
        """Whether runs earn a reward."""
        return self.reward != NO_REWARD

    def without_reward(self) -> Scenario:
        """The same scenario for runs whose reward is not used."""
        return self.model_copy(update={"reward": NO_REWARD})

    def check_reward(self, reward: RewardWeights) -> None:
        """Refuse terms that a fleet, or a cluster of servers, does not have.

        Raises:
            ValueError: Such a term has a weight; names all of them.
        """
        names = _SERVER_TERMS if self.fleet else _FLEET_TERMS
        wrong = [name for name in names if getattr(reward, name)]
        if wrong:
            where = "fleets" if self.fleet else "token-level servers"
            raise ValueError(f"{where} know no reward terms {wrong}: set them to 0")

    @property
    def required_fleet(self) -> Fleet:
        """The fleet, where nothing else will do.

        Raises:
            ValueError: There is none.
        """
        if self.fleet is None:
            raise ValueError(f"scenario {self.name!r} has no fleet; name one whose replicas batch")
        return self.fleet

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return len(self.server_names)

    @property
    def server_names(self) -> tuple[str, ...]:
        """Name of every server."""
        replicas = self.fleet.replicas if self.fleet else self.servers
        return tuple(server.name for server in replicas)

    @property
    def slo(self) -> Slo:
        """The response-time SLO."""
        return Slo(response_s=self.slo_response_s)

    @property
    def server_capacities_tokens_per_s(self) -> tuple[float, ...]:
        """Tokens that each server can process in a second with all its slots at work."""
        if self.fleet:
            lengths = self.mean_lengths_tokens
            return tuple(rate * sum(lengths) for rate in self._requests_per_s(lengths))
        if self.discipline == "parallel_full":
            return tuple(s.tokens_per_s * s.concurrency for s in self.servers)
        return tuple(s.tokens_per_s for s in self.servers)

    @property
    def calibration(self) -> str:
        """Servers as text that changes with what is known of them."""
        if self.fleet is None:
            return "\n".join(server.model_dump_json() for server in self.servers)
        # What the performance model makes of names changes with its calibration.
        replicas = self.fleet.replicas
        return "\n".join(
            f"{replica.model_dump_json()}\n{replica.iteration.tolist()!r}" for replica in replicas
        )

    @cached_property
    def mean_lengths_tokens(self) -> tuple[float, float]:
        """Mean context and output of a request in training traffic, tokens."""
        if self.sessions:
            return self._session_means[:2]
        model = load_model(self.workload)
        return model.mean_context_tokens, model.mean_generated_tokens_overall

    @property
    def capacity_tokens_per_s(self) -> float:
        """Tokens that all servers together can process in a second."""
        return sum(self.server_capacities_tokens_per_s)

    def offered_load(self, rate_per_s: float, mean_context: float, mean_generated: float) -> float:
        """Share of what the servers can do that requests of these mean lengths ask for.

        Nothing counts as cached.
        """
        lengths = (mean_context, mean_generated)
        if self.fleet is None:
            return rate_per_s * sum(lengths) / self.capacity_tokens_per_s
        return rate_per_s / sum(self._requests_per_s(lengths))

    def _requests_per_s(
        self, lengths: tuple[float, float], computed_tokens: float | None = None
    ) -> list[float]:
        """What each replica of the fleet completes in a second (`fleet.requests_per_s`)."""
        return [
            requests_per_s(
                replica.iteration, replica.max_batch, replica.token_budget,
                replica.kv_capacity_tokens, *lengths, computed_tokens,
            )
            for replica in self.required_fleet.replicas
        ]  # fmt: skip

    def warm_load(self, rate_per_s: float) -> float:
        """Share of what the fleet can do that sessions ask for if all they repeat is cached.

        Raises:
            ValueError: There are no sessions.
        """
        fresh = self._session_means.fresh_tokens
        return rate_per_s / sum(self._requests_per_s(self.mean_lengths_tokens, fresh))

    @property
    def _session_means(self) -> SessionMeans:
        if self.sessions is None:
            raise ValueError(f"scenario {self.name!r} has no sessions")
        return session_means(self.sessions, self.workload)

    @cached_property
    def cycle_s(self) -> float:
        """Mean time from one request of a closed client to its next, if nobody waits, seconds.

        Raises:
            ValueError: There are no sessions.
        """
        means = self._session_means
        assert self.sessions is not None
        answer_s = means.answer_tokens * self.sessions.answer_token_s
        return max(answer_s + means.think_s, _SHORTEST_CYCLE_S)

    def num_clients(self, rate_per_s: float) -> int:
        """Clients of a closed process that ask at this rate if nobody waits, at least one.

        Raises:
            ValueError: There are no sessions.
        """
        return max(1, round(rate_per_s * self.cycle_s))

    def rate_per_s(self, mean_total_tokens: float) -> float:
        """Arrival rate in requests per second, for requests of that mean size in tokens."""
        arrivals = self.arrivals
        if arrivals.rate_per_s is not None:
            return arrivals.rate_per_s
        if arrivals.warm_load is not None:
            return arrivals.warm_load / self.warm_load(1.0)
        if arrivals.clients is not None:
            return arrivals.clients / self.cycle_s
        assert arrivals.load is not None
        return arrivals.load * self.capacity_tokens_per_s / mean_total_tokens


def scenario_names() -> list[str]:
    """Names of the scenarios that ship with the package, sorted."""
    return shipped_names("tokenyard", "scenarios/routing")


def load_scenario(name: str) -> Scenario:
    """Read a shipped scenario by name, WORKLOAD@FLEET, or a YAML file by path; parts may be files.

    Raises:
        ValueError: Unknown name (with the closest ones), or a file that does not fit the model.
    """
    workload, on, fleet = name.partition(ON)
    if on and not Path(name).is_file():
        return _on_fleet(workload, fleet)
    fields = read_fields(name, "scenario", "tokenyard", "scenarios/routing")
    return fitted(Scenario, fields, f"scenario {name}")


def _on_fleet(workload: str, fleet: str) -> Scenario:
    """Put a workload on a fleet; each is a part of a scenario."""
    name = f"{workload}{ON}{fleet}"
    workload_fields = read_fields(workload, "workload", "tokenyard", _WORKLOADS)
    fleet_fields = read_fields(fleet, "fleet", "tokenyard", _FLEETS)
    described = [
        str(part.get("description", "")).rstrip(".") for part in (workload_fields, fleet_fields)
    ]
    replicas, classes = fleet_fields.get("fleet"), workload_fields.pop("classes", None)
    if isinstance(replicas, dict) and classes is not None:
        replicas = {**replicas, "classes": classes}
    fields = {
        "name": name,
        **workload_fields,
        "description": ", on ".join(described) + ".",
        "fleet": replicas,
    }
    return fitted(Scenario, fields, f"scenario {name}")
