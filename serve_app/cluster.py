"""A cluster as data: pools of replicas, SLOs, and which policy decides.

A pool is either ours, one Serve deployment of `serve_app.ray_serve.replica`, or external: endpoints
that speak OpenAI's API. Files are YAML; docs/serving/cluster-file.md has an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from serve_app.endpoints import (
    AnyEndpoint,
    Autoscaling,
    GatewayPath,
    KvEvents,
    MetricNames,
    PassedHeader,
    Pattern,
    PeerSettings,
    ServiceDiscovery,
)
from serve_app.engine_config import PAGE_TOKENS, EngineConfig, Hardware
from tokenyard.allocation.types import Parallelism
from tokenyard.config import FrozenModel, check_distinct, fitted, read_fields
from tokenyard.perf.online import GENERIC_ITERATION
from tokenyard.routing.fleet import EngineSpeed, IterationSpeed, requests_per_s
from tokenyard.routing.sessions.rules import make_rule

MAX_PROMPT_TOKENS = 1 << 20
_TIERS = frozenset(("auto", "default", "flex", "priority", "scale", "standard", "standard_only"))
"""OpenAI's and Anthropic's own names, which mean the first class where none has such a name."""
DEFAULT_TENANT = "default"
"""Tenant of requests that name none of the cluster file."""
_ModelName = Annotated[str, Field(min_length=1, max_length=200)]


class EngineProfile(EngineSpeed):
    """How fast one replica is and how much it holds, with its engine's limits."""

    max_batch: Annotated[int, Field(ge=1)]
    token_budget: Annotated[int, Field(ge=1)]
    source: Literal["declared", "estimated"] = "declared"

    def slot_tokens_per_s(self, context_tokens: float, generated_tokens: float) -> float:
        """Full speed over `max_batch`, for requests of these mean lengths, tokens per second."""
        per_s = requests_per_s(
            self.iteration, self.max_batch, self.token_budget, self.kv_capacity_tokens,
            context_tokens, generated_tokens,
        )  # fmt: skip
        return per_s * (context_tokens + generated_tokens) / self.max_batch


class EndpointProfile(IterationSpeed):
    """How fast an endpoint is; for a missing field, what it publishes or a default counts."""

    max_batch: Annotated[int, Field(ge=1)] | None = None
    """Default where nothing is published: 256, as vLLM's."""
    token_budget: Annotated[int, Field(ge=1)] | None = None
    """Left out: 2048, or twice the batch where that is more."""
    kv_capacity_tokens: Annotated[float, Field(ge=1)] | None = None
    """Default where nothing is published: 131072."""
    source: Literal["declared"] = "declared"

    def completed(self, max_batch: int | None, kv_capacity_tokens: float | None) -> EngineProfile:
        """Fill missing fields with what an endpoint publishes; None: it publishes nothing."""
        batch = self.max_batch or max_batch or 256
        defaults = {
            "max_batch": batch, "token_budget": max(2048, 2 * batch),
            "kv_capacity_tokens": kv_capacity_tokens or 131_072.0,
        }  # fmt: skip
        return EngineProfile(**defaults | self.model_dump(exclude_none=True))


class Deadlines(FrozenModel):
    """How long an endpoint may take, seconds. Each is a failure of the endpoint.

    Defaults are those of external pools.
    """

    connect_s: Annotated[float, Field(gt=0)] = 2.0
    """Until the connection is there, TLS included."""
    first_byte_s: Annotated[float, Field(gt=0)] | None = None
    """Until the head of the answer; None: only the first token has a deadline. vLLM sends it before
    it computes, others with the first token."""
    first_token_s: Annotated[float, Field(gt=0)] = 60.0
    """Silence before the first token, the endpoint's queue included, and as much longer as the
    prompt takes by the pool's profile. The request is then sent elsewhere, unless the endpoint
    still answers its scraper: one that is at work has `total_s`."""
    whole_per_token_s: Annotated[float, Field(ge=0)] = 0.25
    """An answer that is not streamed comes at its end: so long after `first_token_s` for each token
    that it may have. It is sent elsewhere, too. Without `max_tokens` it has `total_s`."""
    between_tokens_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time from one token to the next; after it the answer ends with the reason."""
    total_s: Annotated[float, Field(gt=0)] = 600.0
    """Until the last token."""


_OWN_DEADLINES = Deadlines(first_token_s=600.0, between_tokens_s=600.0)
"""An engine of ours queues by itself, and Serve replaces it where it hangs."""


def _cached_block_tokens(fields: Mapping[str, Any]) -> int:
    config = fields.get("config")
    shares = fields.get("engine") == "sharded" and config is not None and config.prefix_caching
    return PAGE_TOKENS if shares else 0


class Pool(FrozenModel):
    """Equal replicas of one engine, deployed by us."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
    """Its name in metrics, logs and `GET /v1/pools`."""
    kind: Literal["own"] = "own"
    served_model: _ModelName | None = None
    """Name by which callers ask for its model; None: the cluster's."""
    engine: str = "sharded"
    """`sharded`, `vllm`, or `module:Class` of an engine of your own."""
    config: EngineConfig
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    max_ongoing: Annotated[int, Field(ge=1)] | None = None
    """Requests that one replica holds; None: its batch and its queue."""
    replica_cpus: Annotated[float, Field(gt=0)] = 0.5
    """CPUs of the replica's own process."""
    node_labels: Mapping[str, str] = {}
    """Ray labels of the nodes that replicas may be on, such as `ray.io/accelerator-type: H100`, or
    those of `ray start --labels`; empty: any node."""
    prefix_block_tokens: Annotated[int, Field(ge=0, default_factory=_cached_block_tokens)]
    """Tokens of one block of the engine's prefix cache; 0: it has none. A `sharded` engine has 32,
    unless its `prefix_caching` is off; of others nothing is known."""
    profile: EngineProfile | None = None
    """What is believed of their speed until their answers show it; None: nothing."""
    deadlines: Deadlines = _OWN_DEADLINES
    """How long a replica may take; where none are given, 600 s for its first token, and from one
    to the next."""

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that one replica holds at most."""
        return self.max_ongoing or self.config.max_batch + self.config.max_waiting


class ExternalPool(FrozenModel):
    """Servers that run already and speak OpenAI's API."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
    """Its name in metrics, logs and `GET /v1/pools`."""
    kind: Literal["external"]
    endpoints: tuple[AnyEndpoint, ...] = ()
    """URLs of the servers, with or without `/v1`."""
    service_discovery: ServiceDiscovery | None = None
    """More endpoints, which come and go."""
    allowed: tuple[Pattern, ...] = ()
    """Networks (`10.0.0.0/8`) and names of hosts (`*.llm.svc`) of endpoints that come while the
    gateway runs. Where there are none, `POST /v1/pools` adds none, and discovery any."""
    metrics: MetricNames = MetricNames()
    model: str
    """Name by which the endpoints know the model."""
    served_model: _ModelName | None = None
    """Name by which callers ask for it; None: the cluster's."""
    loras: tuple[_ModelName, ...] = ()
    """LoRA adapters of the model, all on every endpoint. Callers and endpoints have the same names
    for them, which are those of models in requests (vLLM's `--lora-modules`)."""
    profile: EndpointProfile | None = None
    """What is believed of their speed until their answers show it; None: nothing, or what
    `hardware` says."""
    hardware: Hardware | None = None
    """On what they run, where the performance model knows it: for a pool without `profile`."""
    max_ongoing: Annotated[int, Field(ge=1)] = 1024
    """Most requests of this gateway in flight at one endpoint; more are placed elsewhere. Where
    there is no room anywhere they wait in the cluster's `queue`, or get 429."""
    autoscaling: Autoscaling | None = None
    """Recommends a number of endpoints, as a metric and in `GET /v1/pools`."""
    order: Literal["fcfs", "priority"] = "fcfs"
    """The endpoints' `--scheduling-policy`. With `priority` each request is sent with its place in
    the policy's order as vLLM's `priority`, and callers may give none of their own."""
    max_model_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt plus output; None: what the endpoints say."""
    prefix_block_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of one block of the endpoints' prefix cache (vLLM: 16); 0: none is assumed."""
    kv_events: KvEvents | None = None
    """Where endpoints publish what that cache holds; None: what was sent counts as cached."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoints' bearer token."""
    rewrite_model: bool = False
    """Whether answers name the model as callers ask for it, where `model` is another name."""
    pass_headers: tuple[PassedHeader, ...] = ()
    """Headers of callers that its endpoints get, beside those that all endpoints get."""
    deadlines: Deadlines = Deadlines()
    commit: Literal["first_token", "first_byte"] = "first_token"
    """What of a stream is handed on at once: all from its first token on, so that another endpoint
    can answer until then, or everything, with its head and comments."""

    @cached_property
    def prior(self) -> EndpointProfile:
        """Their profile, or what stands in for it."""
        if self.profile is not None:
            return self.profile
        known = None if self.hardware is None else self.hardware.replica
        values = GENERIC_ITERATION if known is None else known.iteration
        times = dict(zip(IterationSpeed.model_fields, values.tolist(), strict=True))
        capacity = None if known is None else known.kv_capacity_tokens
        return EndpointProfile(**times, kv_capacity_tokens=capacity)

    @model_validator(mode="after")
    def _may_have_endpoints(self) -> Self:
        if self.profile is not None and self.hardware is not None:
            raise ValueError("give profile or hardware, not both")
        if not (self.endpoints or self.service_discovery or self.allowed):
            raise ValueError("give endpoints, service_discovery, or what is allowed to be added")
        if self.kv_events is not None and not self.prefix_block_tokens:
            raise ValueError("kv_events needs prefix_block_tokens: the engine's size of a block")
        return self


AnyPool = Annotated[Pool | ExternalPool, Field(discriminator="kind")]


class PlanMessage(FrozenModel):
    """A plan, as a file or a person writes it."""

    parallelism: Parallelism
    """How GPUs make replicas, such as `data`, `model` or `hybrid_tp2`."""
    num_gpus: Annotated[int, Field(ge=1, le=1024)]
    """GPUs of all replicas together."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory; None: the least that is best."""
    max_batch: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Most sequences that a replica decodes at once; None: likewise."""


class ReshapingLimits(FrozenModel):
    """Limits on how a policy reshapes a pool, besides those of its scenario."""

    min_replicas: Annotated[int, Field(ge=0)] = 1
    """Replicas that stay ready during a change; 0 lets service pause while requests wait."""
    cooldown_slots: Annotated[int, Field(ge=0)] = 1
    """Slots after a change in which the policy makes no other."""
    shrink_after_s: Annotated[float, Field(ge=0)] = 600.0
    """Time after a growth in which the policy takes nothing back, in the scenario's time: a load
    that wavers around a step turns the pool once in that time, not in every slot."""
    change_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """After so long a change is given up, and the plan before it restored. Where that takes as
    long, or the start does, it goes on, and another plan may be asked for."""
    dry_run: bool = False
    """Only say what would be done."""


class AllocatedPool(ReshapingLimits):
    """A pool whose plan (its replicas' shape and number) a policy decides."""

    scenario: str
    """Allocation scenario whose GPUs, model, SLO, slot and limits hold: a shipped name or a
    YAML path."""
    template: Pool
    """What every replica has in common; its name is the first part of the pools' names. The plan
    sets `tensor_parallel`, `pipeline_parallel` and `memory_fraction`, and lowers `max_batch`."""
    policy: str = "champion"
    """`champion`, the registry's `candidate`, a policy file (.npz), or an allocation baseline's
    name."""
    start: PlanMessage | None = None
    """Plan of the beginning; None: the cheapest that serves half of what the pool can."""

    @model_validator(mode="after")
    def _takes_what_the_plan_says(self) -> Self:
        config = self.template.config
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(config, name) > 1:
                raise ValueError(f"template: the plan sets {name}; leave it out")
        return self

    @property
    def time_scale(self) -> float:
        """Seconds of real time per second of the scenario."""
        emulates = self.template.config.emulates
        return 1.0 if emulates is None else emulates.time_scale


class SloClass(FrozenModel):
    """The SLO of a class of requests; a request names its class by `service_tier`."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """Name by which requests ask for it."""
    response_s: Annotated[float, Field(gt=0)]
    """SLO of the response time."""
    ttft_s: Annotated[float, Field(gt=0)] | None = None
    """SLO of the time to first token; None: there is none."""
    tpot_s: Annotated[float, Field(gt=0)] | None = None
    """SLO of the mean time per output token after the first; None: there is none."""
    admitted_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of `max_in_flight` that may be taken when a request of this class is let in: below 1
    keeps room for the other classes."""
    max_wait_s: Annotated[float, Field(gt=0)] | None = None
    """Longest time that one of this class waits at the gateway for a replica to have room, in place
    of the queue's; then it gets 429."""


class Limits(FrozenModel):
    """What one request may ask for, and all requests together."""

    max_in_flight: Annotated[int, Field(ge=1)] = 1024
    """Requests accepted and not yet answered; one more gets 429 and a Retry-After."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_PROMPT_TOKENS)] = 32_768
    """Longest prompt, for pools of ours."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_PROMPT_TOKENS)] = 4_096
    """Longest answer, for pools of ours."""
    default_output_tokens: Annotated[int, Field(ge=1)] = 256
    """`max_tokens` of a request that names none."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time from arrival to the last token, and for which a caller may read nothing."""
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    """Time for which answers that have begun may go on when the gateway is told to end."""
    head_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest time in which a request's head must come, and the first of a connection begin."""
    body_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest time from one piece of a request's body to the next."""
    max_body_bytes: Annotated[int, Field(ge=1)] = 16 << 20
    """Longest body on OpenAI's routes; on the others it is 1 MiB."""
    max_connections: Annotated[int, Field(ge=1)] = 4096
    """Connections that callers hold open; one more is closed with 503."""
    max_connections_per_address: Annotated[int, Field(ge=1)] = 1024
    """Connections of one address. A proxy in front is one address."""
    keep_alive_s: Annotated[int, Field(ge=1)] = 75
    """Time after an answer for which its connection waits for another request."""
    max_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """How often a request is placed again after a replica failed before its first token."""


class QueueSettings(FrozenModel):
    """How requests wait at the gateway while every replica for them is full."""

    max_requests: Annotated[int, Field(ge=1)] = 1000
    """Requests that wait; one more gets 429. They are in flight: see `limits.max_in_flight`."""
    max_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time that one waits for a replica to have room; then it gets 429."""


class SessionSettings(FrozenModel):
    """How sessions are let into KV memory: see `serve_app.gateway.sessions`."""

    rule: str = "index_las:lease_s=5"
    """Rule that holds sessions, and its numbers, as `tokenyard evaluate` takes them for scenarios
    of sessions. Its orders and pins are for engines: here the policy places."""

    @field_validator("rule")
    @classmethod
    def _needs_what_is_known(cls, name: str) -> str:
        rule = make_rule(name)
        if rule.tick_s or rule.remaining:
            raise ValueError(
                f"rule {name} is for the simulator alone: the gateway predicts no remaining work, "
                "and has no ticks"
            )
        return name


class TenantSettings(FrozenModel):
    """Who shares the cluster with others."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share is its weight over the sum of all tenants' weights."""


class CircuitBreakerSettings(FrozenModel):
    """When a policy is not asked, and for how long: see `serve_app.policy.runner`."""

    budget_s: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Longest time that a choice may be computed; on a busy machine five times that may pass."""
    failures_to_open: Annotated[int, Field(ge=1)] = 3
    """Failures in a row after which the breaker opens; one is enough if the policy was too slow."""
    cool_down_s: Annotated[float, Field(gt=0)] = 10.0
    """Time for which it is open: the policy is not asked."""
    stale_after_s: Annotated[float, Field(gt=0)] = 5.0
    """Age from which on a replica's published state counts as unknown."""


class OutlierEjection(FrozenModel):
    """How replicas that fail are left out: see `serve_app.gateway.outliers`."""

    consecutive_failures: Annotated[int, Field(ge=1)] = 3
    """Requests in a row that a replica fails until it is left out. A request that several replicas
    failed, and none answered, does not count: it may be at fault itself."""
    base_s: Annotated[float, Field(gt=0)] = 1.0
    """Time for which a replica is left out the first time; it doubles each time after."""
    max_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest such time. So long without a failure, and one ejection is forgiven."""
    readmit_after: Annotated[int, Field(ge=1, le=30)] = 4
    """Answers that must begin until a replica that comes back takes any number of requests: before,
    it holds one at a time, then 2, 4, ..."""


class TlsFiles(FrozenModel):
    """Certificate and key of the gateway; both are read again when they change."""

    certificate: GatewayPath
    """PEM, with those of its issuers after it."""
    key: GatewayPath
    """PEM, without a password."""


class Cors(FrozenModel):
    """Sites whose pages may send requests, such as `https://chat.example.com`; `*`: any."""

    origins: Annotated[tuple[str, ...], Field(min_length=1)]


class GatewaySettings(FrozenModel):
    """Place, files and routes of the gateway."""

    cpus: Annotated[float, Field(ge=0)] = 0.1
    """CPUs that it reserves on Ray; 0 lets it onto a head node that offers none."""
    node_labels: Mapping[str, str] = {}
    """Ray labels of the nodes that it may be on."""
    keys: GatewayPath | None = None
    """File of API keys, read anew when it changes: see
    `serve_app.gateway.callers.KeysMessage`. None: the tokens of the environment alone."""
    audit_log: GatewayPath | None = None
    """File that gets a line of JSON for each change: of policies, of plans
    by hand, of keys. None: only the last 200 are kept, in memory and in the state file."""
    tls: TlsFiles | None = None
    """Certificate of the gateway; None: plain HTTP, for a proxy in front."""
    routes: tuple[Annotated[str, Field(pattern=r"^/[^?#\s]+$")], ...] = ()
    """More paths that are handed on to endpoints; `/v1/files/` stands for all that begin so."""
    cors: Cors | None = None
    """None: browsers keep pages of other sites from asking."""
    peers: PeerSettings | None = None
    """None: it knows of others' requests only what replicas publish."""
    sse_keep_alive_interval_s: Annotated[float, Field(gt=0)] | None = None
    """Time between comments that whoever waits for a stream to begin is sent, so that no proxy
    between takes the connection for dead. With the first one the status is 200, and what goes wrong
    later is an event. None: there are none."""


FORMAT_VERSION: Literal[1] = 1
"""Version of cluster files: grows when a key changes its meaning, or one without a default is
added."""


class Cluster(FrozenModel):
    """Everything that the gateway serves, and how."""

    format_version: Literal[1] = FORMAT_VERSION
    """Version of the file. Keys with a default come and go without a new one."""
    name: str
    """Name of the cluster, in logs and rows."""
    description: str
    """What it is for, in a sentence."""
    served_model: _ModelName
    """Name by which callers ask for the model of pools that name none, and what a request gets that
    names none."""
    scenario: str = "conversation_mixed_gpus"
    """Whose champion, tuned rules, mean lengths and length predictor are used."""
    policy: str = "champion"
    """`champion`, the registry's `candidate`, a policy file (.npz), a baseline's name, or
    `ray_default`."""
    baseline: str = "marginal_delay"
    """Decides where the policy cannot."""
    explore_fraction: Annotated[float, Field(ge=0, le=0.05)] = 0.01
    """Share of decisions drawn at random among the replicas that keep the SLO."""
    classes: Annotated[tuple[SloClass, ...], Field(min_length=1)] = (
        SloClass(name="default", response_s=30.0),
    )
    """The first is that of requests that name none."""
    limits: Limits = Limits()
    circuit_breaker: CircuitBreakerSettings = CircuitBreakerSettings()
    outlier_ejection: OutlierEjection = OutlierEjection()
    gateway: GatewaySettings = GatewaySettings()
    routing_stats_period_s: Annotated[float, Field(gt=0)] = 0.25
    """Time between two publications of a replica's state."""
    pools: tuple[AnyPool, ...] = ()
    allocation: AllocatedPool | None = None
    """A pool that is reshaped under load, beside those that stay as they are."""
    queue: QueueSettings | None = None
    """Requests wait at the gateway where all replicas have `max_ongoing` in flight; None: they get
    429 at once."""
    sessions: SessionSettings | None = None
    """Turns of sessions wait at the gateway while KV memory has no room for these; None: sessions
    are not looked at."""
    tenants: Mapping[str, TenantSettings] = {}
    """Whose requests orders such as `fair` tell apart. Those that name none of them are those of
    `default`, of weight 1 where that is not among them."""
    decide_only: bool = False
    """Serve no model: answer which replica a caller should choose, and nothing is sent."""

    @model_validator(mode="after")
    def _has_a_pool(self) -> Self:
        has_one = bool(self.pools) or self.allocation is not None
        if not has_one and not self.decide_only:
            raise ValueError("give at least one pool, or an allocation")
        if has_one and self.decide_only:
            raise ValueError("decide_only serves no pools; leave one of both out")
        if self.gateway.peers is not None and self.sessions is not None:
            raise ValueError("sessions are held by one gateway: it has no peers")
        return self

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        check_distinct("pool", [pool.name for pool in (*self.pools, *self.templates)])
        check_distinct("class", [slo_class.name for slo_class in self.classes])
        # By its URL an endpoint is known, and what is in flight there counted.
        endpoints = [endpoint for pool in self.external_pools for endpoint in pool.endpoints]
        check_distinct("endpoint", [endpoint.address for endpoint in endpoints])
        return self

    @model_validator(mode="after")
    def _waits_where_there_is_a_queue(self) -> Self:
        waits = [slo_class.name for slo_class in self.classes if slo_class.max_wait_s is not None]
        if waits and self.queue is None:
            raise ValueError(f"class {waits[0]!r} has max_wait_s, but nothing waits: give a queue")
        return self

    @model_validator(mode="after")
    def _names_of_models_are_distinct(self) -> Self:
        pools = (*self.pools, *self.templates)
        names = {self.model_of(pool) for pool in pools}
        if pools and self.served_model not in names:
            raise ValueError(f"no pool serves served_model {self.served_model!r}")
        for name in names:
            own = (*self.own_pools, *self.templates)
            models = {pool.config.model for pool in own if self.model_of(pool) == name}
            if len(models) > 1:
                raise ValueError(
                    f"pools serve different models {sorted(models)} as {name!r}; give one to all, "
                    "or a served_model to some"
                )
        parents: dict[str, str] = {}
        for pool in self.external_pools:
            for name in pool.loras:
                parent = parents.setdefault(name, self.model_of(pool))
                if name in names or parent != self.model_of(pool):
                    raise ValueError(f"adapter {name!r} has the name of another model or adapter")
        return self

    def model_of(self, pool: Pool | ExternalPool) -> str:
        """Name by which callers ask for what a pool serves."""
        return pool.served_model or self.served_model

    def service_class(self, name: str | None) -> SloClass | None:
        """Return the class of that name, the first for None; None: there is none."""
        if not name:
            return self.classes[0]
        named = next((slo_class for slo_class in self.classes if slo_class.name == name), None)
        return self.classes[0] if named is None and name in _TIERS else named

    def tenant_named(self, name: str | None) -> str:
        """Return the tenant that requests of that name are for; empty: there are no tenants."""
        if not self.tenants:
            return ""
        return DEFAULT_TENANT if name is None or name not in self.tenants else name

    def tenant_share(self, name: str) -> float:
        """Return the share of the service that a tenant is entitled to, in (0, 1]."""
        if not self.tenants:
            return 1.0
        weights = {tenant: settings.weight for tenant, settings in self.tenants.items()}
        return min(weights.get(name, TenantSettings().weight) / sum(weights.values()), 1.0)

    @property
    def own_pools(self) -> tuple[Pool, ...]:
        """Pools that we deploy."""
        return tuple(pool for pool in self.pools if isinstance(pool, Pool))

    @property
    def templates(self) -> tuple[Pool, ...]:
        """What the replicas of the allocated pool have in common, if there is one."""
        return () if self.allocation is None else (self.allocation.template,)

    @property
    def external_pools(self) -> tuple[ExternalPool, ...]:
        """Pools that run already."""
        return tuple(pool for pool in self.pools if isinstance(pool, ExternalPool))

    @property
    def needs_ray(self) -> bool:
        """Whether something of it runs on Ray: pools of ours."""
        return bool(self.own_pools or self.templates)


def load_cluster(name: str) -> Cluster:
    """Read a shipped cluster by name, or a YAML file by path.

    Raises:
        ValueError: Unknown name, no such file, or one that does not fit the model.
    """
    fields = read_fields(name, "cluster", "serve_app", "clusters")
    version = fields.get("format_version", FORMAT_VERSION)
    if version not in (None, FORMAT_VERSION):
        raise ValueError(
            f"cluster file {name} has format version {version!r}; this release reads "
            f"{FORMAT_VERSION}"
        )
    return fitted(Cluster, fields, f"cluster file {name}")
