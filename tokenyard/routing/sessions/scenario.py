"""Session scenarios: which workload arrives on which fleet, how often, and how much memory is."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator

from tokenyard.config import FrozenModel, fitted, read_fields, shipped_names
from tokenyard.routing.fleet import Fleet, ReplicaConfig
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.simulator.sessions import SessionReplicas, SessionStream, said_before
from tokenyard.workload.model import load_model
from tokenyard.workload.sessions import Sessions

AT_RATE = "@"
"""Between a scenario's name and sessions per hour in place of its own."""
_FOLDER = "scenarios/sessions"
_LARGEST_SHARE = 0.9
"""A session ends before a prompt and its answer fill more of the smallest replica's KV memory."""
_BATCH_KV_TOKENS = 45_000.0
"""KV that a replica reads for each output token, where remaining work is told in seconds."""
_PREDICTION_ERROR = 0.7
"""Standard deviation of the logarithm of predicted over true remaining work."""


class SessionScenario(FrozenModel):
    """Sessions that arrive as a Poisson process; their turns wait for answers and tools."""

    name: str
    description: str
    problem: Literal["sessions"] = "sessions"
    traffic: str
    """Routing scenario whose fleet and sessions these are, such as agentic_trace_replay@mixed."""
    sessions_per_a100_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Arrivals per hour, for each A100 that the fleet is worth."""
    sessions_per_a100: Annotated[int, Field(ge=5)] = 120
    """Sessions of a stream, for each A100 that the fleet is worth."""
    kv_share: Annotated[float, Field(gt=0, le=16)] = 1.0
    """KV memory over what the fleet has: below 1 it is scarcer."""
    host_kv_tokens: Annotated[float, Field(ge=0)] = 0.0
    """Tokens of a host KV tier at every replica; 0: there is none."""
    host_token_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to load a token from it."""

    @field_validator("traffic")
    @classmethod
    def _has_sessions(cls, name: str) -> str:
        scenario = load_scenario(name)
        if scenario.fleet is None or scenario.sessions is None:
            raise ValueError(f"routing scenario {name!r} has no fleet or no sessions")
        return name

    @cached_property
    def routing(self) -> Scenario:
        """The routing scenario."""
        return load_scenario(self.traffic)

    @property
    def fleet(self) -> Fleet:
        """Its fleet."""
        return self.routing.required_fleet

    @property
    def sessions(self) -> Sessions:
        """How its sessions are drawn."""
        assert self.routing.sessions is not None
        return self.routing.sessions

    @property
    def num_gpus(self) -> int:
        """GPUs of the fleet."""
        return sum(getattr(replica, "tensor_parallel", 1) for replica in self.fleet.replicas)

    @cached_property
    def a100s(self) -> float:
        """What the fleet is worth: the sum of its speeds in reading KV, over that of one A100."""
        a100 = ReplicaConfig(name="a100", gpu="a100_80g_sxm_vllm", model="llama3_8b")
        return float((a100.iteration[3] / self.replicas.iteration[:, 3]).sum())

    @cached_property
    def replicas(self) -> SessionReplicas:
        """The fleet as numbers."""
        configs = self.fleet.replicas
        same = np.ones(len(configs))
        page = self.fleet.page_tokens
        kv_tokens = [
            page * (self.kv_share * config.kv_capacity_tokens // page) for config in configs
        ]
        return SessionReplicas(
            np.array([config.iteration for config in configs]),
            np.array(kv_tokens),
            np.array([float(config.max_batch) for config in configs]),
            np.array([float(config.token_budget) for config in configs]),
            self.host_kv_tokens * same,
            self.host_token_s * same,
        )

    def draw(self, rng: np.random.Generator) -> SessionStream:
        """Draw a stream; remaining work is predicted as the truth times e^(0.7 N)."""
        replicas = self.replicas
        model = load_model(self.routing.workload)
        num = math.ceil(self.sessions_per_a100 * self.a100s)
        turns, _ = self.sessions.draw_turns(num, rng, model)
        most = _LARGEST_SHARE * replicas.kv_tokens.min()
        turns = turns.where(turns.context + turns.answer <= most)
        # What comes after a turn that does not fit would be a part of its prompt.
        turns = turns.where(_unbroken(turns.session, turns.turn))
        first = np.flatnonzero(turns.turn == 0)
        num = len(first)
        rate_per_s = self.sessions_per_a100_hour * self.a100s / 3600.0
        arrival_s = np.cumsum(rng.exponential(1.0 / rate_per_s, num))
        context, answer = turns.context.astype(np.float64), turns.answer.astype(np.float64)
        kept = said_before(context, answer, first)
        stream = SessionStream(arrival_s, first, context, answer, turns.think_s, context, kept)
        _, prefill_s, _, kv_s = replicas.iteration[0]
        work_s = (context - kept) * prefill_s + answer * kv_s * _BATCH_KV_TOKENS
        later_s = np.cumsum(work_s[::-1])[::-1]
        ends = np.append(later_s, 0.0)[stream.first_turn + stream.num_turns]
        error = np.exp(rng.normal(0.0, _PREDICTION_ERROR, num))
        remaining_s = (later_s - ends[stream.session]) * error[stream.session]
        return replace(stream, remaining_s=remaining_s)


def _unbroken(session: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Which turns have all those before them."""
    place = np.arange(len(session))
    begins = np.append(True, np.diff(session) != 0)
    return np.asarray(turn == place - np.maximum.accumulate(np.where(begins, place, 0)))


def idle_s(replicas: SessionReplicas, stream: SessionStream) -> np.ndarray:
    """Time of each session on an idle fastest GPU with all it repeats cached, tools included."""
    fastest = int(replicas.iteration[:, 3].argmin())
    iteration_s, prefill_s, sequence_s, kv_s = replicas.iteration[fastest]
    fresh = stream.context - stream.kept
    chunks = np.ceil(fresh / replicas.token_budget[fastest])
    serve_s = chunks * iteration_s + prefill_s * fresh + kv_s * (stream.context - fresh) * chunks
    kv = stream.context + stream.answer / 2.0
    serve_s += (stream.answer - 1.0) * (iteration_s + sequence_s + kv_s * kv)
    tool_s = stream.tool_s.copy()
    tool_s[stream.first_turn + stream.num_turns - 1] = 0.0
    return np.bincount(stream.session, serve_s + tool_s, minlength=len(stream))


def scenario_names() -> list[str]:
    """Names of the session scenarios that ship, sorted."""
    return shipped_names("tokenyard", _FOLDER)


def load_session_scenario(name: str) -> SessionScenario:
    """Read a shipped scenario by name, NAME@SESSIONS_PER_A100_HOUR, or a YAML file by path.

    Raises:
        ValueError: Unknown name, or a file or rate that does not fit.
    """
    base, at, rate = name.partition(AT_RATE)
    if at and not name.endswith((".yaml", ".yml")):
        fields = read_fields(base, "session scenario", "tokenyard", _FOLDER)
        fields |= {"name": name, "sessions_per_a100_hour": rate}
    else:
        fields = read_fields(name, "session scenario", "tokenyard", _FOLDER)
    return fitted(SessionScenario, fields, f"session scenario {name}")
