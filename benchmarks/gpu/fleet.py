"""Two or three engines on one card as a mixed fleet: policies on the same arrivals.

Engines are first timed while all of them work, since they share the card; what they told is the
profile that the policies see and that the simulator's forecast is made of (`summary`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import engine_process
from benchmarks.gpu.carrier import Carrier, Sent
from benchmarks.gpu.cells import Deadline, Table
from benchmarks.gpu.rank_engine import save_models
from serve_app.cluster import EngineProfile
from serve_app.engine_config import EngineConfig
from tokenyard.perf.calibration import fit_iterations
from tokenyard.perf.profiles import ITERATION_COLUMNS, IterationProfile
from tokenyard.routing.artifact import DEFAULT_RULE, length_predictor
from tokenyard.routing.fleet import requests_per_s
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.types import RoutingPolicy
from tokenyard.workload.model import load_model, poisson_arrivals
from tokenyard.workload.trace import Trace

POLICIES = ("round_robin", "sed", DEFAULT_RULE)
PROFILE = (
    "engine", "model", "device", "mps_percent", "max_batch", "token_budget", "iteration_s",
    "prefill_token_s", "sequence_s", "kv_token_s", "kv_capacity_tokens",
)  # fmt: skip
SPEED = PROFILE[4:]
"""Those that are an `EngineProfile`."""
REQUESTS = (
    "policy", "request", "engine", "arrival_s", "context_tokens", "generated_tokens", "response_s",
    "ttft_s",
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One engine of the fleet."""

    name: str
    model: str
    max_batch: int
    token_budget: int
    kv_bytes: int
    mps_percent: int

    def config(self, models: Path, device: str) -> EngineConfig:
        """What its process runs."""
        return EngineConfig(
            model=str(models / self.model), max_batch=self.max_batch, kv_bytes=self.kv_bytes,
            token_budget=self.token_budget, max_model_tokens=4096, memory_fraction=1.0,
            dtype="bfloat16" if device == "cuda" else "float32",
        )  # fmt: skip

    def waves(self, longest: int, output: int) -> list[list[tuple[int, int]]]:
        """Batches of 1, 2, 4, .. sequences at three contexts, by which it is timed."""
        sizes = [2**i for i in range(self.max_batch.bit_length())]
        contexts = (longest // 16 + 1, longest // 4, longest // 2)
        return [[(context, output)] * size for size in sizes for context in contexts]


@dataclass(frozen=True)
class Fleet:
    """Engines, and what is asked of them."""

    members: tuple[Member, ...]
    scenario: str
    """Whose traffic and SLO."""
    most_context: int
    most_output: int
    load: float
    duration_s: float
    most_requests: int
    wave_output: int

    def traffic(self, profiles: list[EngineProfile]) -> Trace:
        """Return the requests that every policy gets; equal profiles give equal ones."""
        rng = np.random.default_rng(0)
        model = load_model(load_scenario(self.scenario).workload)
        context, output = model.sample_lengths(self.most_requests, rng)
        context, output = context.clip(4, self.most_context), output.clip(2, self.most_output)
        lengths = float(context.mean()), float(output.mean())
        capacity_per_s = sum(
            requests_per_s(
                one.iteration, one.max_batch, one.token_budget, one.kv_capacity_tokens, *lengths
            )
            for one in profiles
        )
        rate_per_s = self.load * capacity_per_s
        num = max(8, min(self.most_requests, int(rate_per_s * self.duration_s)))
        return Trace(poisson_arrivals(num, rate_per_s, rng), context[:num], output[:num])


FULL = Fleet(
    (
        Member("fast", "llama_1b", 32, 1024, 4 << 30, 50),
        Member("narrow", "llama_1b", 4, 512, 2 << 30, 20),
        Member("slow", "llama_3b", 16, 512, 8 << 30, 30),
    ),
    "conversation_mixed_gpus", 2048, 256, 0.7, 60.0, 2000, 24,
)  # fmt: skip
TINY = Fleet(
    (Member("wide", "tiny", 4, 64, 4 << 20, 60), Member("deep", "tiny_deep", 2, 48, 4 << 20, 40)),
    "emulated", 60, 8, 0.4, 2.0, 16, 5,
)  # fmt: skip


def run(out: Path, device: str, tiny: bool, deadline: Deadline) -> bool:
    """Time the engines, and run the policies that were not run yet; return whether all were."""
    fleet, requests = TINY if tiny else FULL, Table(out / "fleet_requests.csv", REQUESTS)
    missing = [name for name in POLICIES if not requests.has(policy=name)]
    if not missing:
        return True
    _save_models(fleet, out / "models", device)
    shares = device == "cuda" and engine_process.start_mps()
    with ExitStack() as stack:
        pipes = {}
        for member in fleet.members:
            config, percent = member.config(out / "models", device), member.mps_percent
            process, pipes[member.name] = engine_process.start(config, percent if shares else None)
            stack.callback(engine_process.end, process, pipes[member.name])
        told = {name: pipe.recv() for name, pipe in pipes.items()}
        carrier = Carrier(pipes)
        profiles = _profiles(fleet, carrier, told, shares, out)
        for name in missing:
            if deadline.passed:
                return False
            requests.add(*_replay(fleet, carrier, profiles, name))
            print(f"fleet {name}: {len(requests.rows)} requests so far")
    return True


def _save_models(fleet: Fleet, folder: Path, device: str) -> None:
    # In a process of its own: this one must hold nothing on the card.
    names = {member.model for member in fleet.members}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    process = get_context("spawn").Process(target=save_models, args=(folder, names, dtype, device))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("the models could not be written")


def _profiles(
    fleet: Fleet, carrier: Carrier, told: dict[str, tuple[int, str]], shares: bool, out: Path
) -> dict[str, EngineProfile]:
    """Warm all engines together; the first time, fit what they tell of their iterations."""
    carrier.drive({member.name: [[(8, 2)]] for member in fleet.members})
    table = Table(out / "fleet_profiles.csv", PROFILE)
    if not table.rows:
        for some in carrier.iterations.values():
            some.clear()
        waves = {
            one.name: one.waves(fleet.most_context, fleet.wave_output) for one in fleet.members
        }
        carrier.drive(waves)
        rows = [_timed(one, carrier, told[one.name], shares, out) for one in fleet.members]
        table.add(*rows)
    return read_profiles(table)


def _timed(
    member: Member, carrier: Carrier, told: tuple[int, str], shares: bool, out: Path
) -> tuple[Any, ...]:
    rows = np.array(carrier.iterations[member.name])
    path = out / f"fleet_iterations_{member.name}.csv"
    path.unlink(missing_ok=True)  # Of a run that ended before it had all profiles.
    Table(path, ITERATION_COLUMNS).add(*rows.tolist())
    base_s, *more = fit_iterations(IterationProfile(rows[:, :3].T, rows[:, 3])).values.tolist()
    percent, limits = member.mps_percent if shares else "", (member.max_batch, member.token_budget)
    return (
        member.name, member.model, told[1], percent, *limits, max(base_s, 1e-9), *more, told[0],
    )  # fmt: skip


def read_profiles(table: Table) -> dict[str, EngineProfile]:
    """Return the profiles of the engines by name."""
    return {
        row["engine"]: EngineProfile.model_validate({name: row[name] for name in SPEED})
        for row in table.rows
    }


def live_policy(name: str, scenario: Scenario, num_replicas: int) -> RoutingPolicy:
    """Make a rule."""
    context = PolicyContext(scenario.name, scenario.slo, np.random.default_rng(0), num_replicas)
    return make_policy(name, context)


def _replay(
    fleet: Fleet, carrier: Carrier, profiles: dict[str, EngineProfile], name: str
) -> list[tuple[Any, ...]]:
    scenario, trace = load_scenario(fleet.scenario), fleet.traffic(list(profiles.values()))
    predictor = length_predictor(load_model(scenario.workload))
    make = partial(live_policy, name, scenario, len(profiles))
    done = carrier.replay(trace, make, profiles, predictor.generated_tokens)
    return [_row(name, number, sent, done[0].due_s) for number, sent in enumerate(done)]


def _row(policy: str, number: int, sent: Sent, first_s: float) -> tuple[Any, ...]:
    sizes = sent.context_tokens, sent.num_generated
    times_s = sent.last_s - sent.due_s, sent.first_s - sent.due_s
    return policy, number, sent.engine, sent.due_s - first_s, *sizes, *times_s
