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

import numpy as np
import torch

from benchmarks.gpu import engine_process
from benchmarks.gpu.carrier import Carrier, Sent
from benchmarks.gpu.cells import Deadline, Table
from benchmarks.gpu.rank_engine import save_models
from serve_app.cluster import EngineProfile
from serve_app.engines.base import EngineConfig
from tokenyard.perf.calibration import fit_iterations
from tokenyard.perf.profiles import ITERATION_COLUMNS, IterationProfile
from tokenyard.routing.artifact import learned_policy, length_predictor, resolve_champion
from tokenyard.routing.fleet import requests_per_s
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.types import RoutingPolicy
from tokenyard.workload.model import load_model, poisson_arrivals
from tokenyard.workload.trace import Trace

POLICIES = ("round_robin", "sed", "generic")
PROFILE = (
    "engine", "model", "device", "mps_percent", "max_batch", "token_budget", "iteration_s",
    "prefill_token_s", "sequence_s", "kv_token_s", "kv_capacity_tokens",
)  # fmt: skip
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


def traffic(fleet: Fleet, scenario: Scenario, profiles: list[EngineProfile]) -> Trace:
    """Return the requests that every policy gets; equal profiles give equal ones."""
    rng = np.random.default_rng(0)
    context, output = load_model(scenario.workload).sample_lengths(fleet.most_requests, rng)
    context, output = np.clip(context, 4, fleet.most_context), np.clip(output, 2, fleet.most_output)
    capacity = sum(
        requests_per_s(
            one.iteration, one.max_batch, one.token_budget, one.kv_capacity_tokens,
            float(context.mean()), float(output.mean()),
        )
        for one in profiles
    )  # fmt: skip
    rate_per_s = fleet.load * capacity
    num = max(8, min(fleet.most_requests, int(rate_per_s * fleet.duration_s)))
    return Trace(poisson_arrivals(num, rate_per_s, rng), context[:num], output[:num])


def live_policy(name: str, scenario: Scenario, num_replicas: int) -> RoutingPolicy:
    """Make a rule or the learned policy for any cluster."""
    if name == "generic":
        return learned_policy(resolve_champion("routing", "generic")[0], slo=scenario.slo)
    context = PolicyContext(scenario.name, scenario.slo, np.random.default_rng(0), num_replicas)
    return make_policy(name, context)


def run(out: Path, device: str, tiny: bool, deadline: Deadline) -> bool:
    """Time the engines, and run the policies that were not run yet; return whether all were."""
    fleet = TINY if tiny else FULL
    profiles, requests = Table(out / "fleet_profiles.csv", PROFILE), Table(
        out / "fleet_requests.csv", REQUESTS
    )  # fmt: skip
    missing = [name for name in POLICIES if not requests.has(policy=name)]
    if not missing:
        return True
    _save_models(fleet, out / "models", device)
    with ExitStack() as stack:
        shares = stack.enter_context(engine_process.mps(device == "cuda"))
        pipes = {}
        for member in fleet.members:
            config = _config(member, out / "models", device)
            started = engine_process.start(config, member.mps_percent if shares else None)
            stack.callback(_end, *started)
            pipes[member.name] = started[1]
        told = {name: pipe.recv() for name, pipe in pipes.items()}
        carrier = Carrier(pipes)
        _time_engines(fleet, carrier, told, shares, out, profiles)
        for name in missing:
            if deadline.passed:
                return False
            requests.add(*_replay(fleet, carrier, profiles, name))
            print(f"fleet {name}: {len(requests.rows)} requests so far")
    return True


def _config(member: Member, models: Path, device: str) -> EngineConfig:
    return EngineConfig(
        model=str(models / member.model), max_batch=member.max_batch, kv_bytes=member.kv_bytes,
        token_budget=member.token_budget, max_model_tokens=4096, memory_fraction=1.0,
        dtype="bfloat16" if device == "cuda" else "float32",
    )  # fmt: skip


def _save_models(fleet: Fleet, folder: Path, device: str) -> None:
    names = {member.model for member in fleet.members}
    if all((folder / name / "config.json").is_file() for name in names):
        return
    # In a process of its own: this one must hold nothing on the card.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    process = get_context("spawn").Process(target=save_models, args=(folder, names, dtype, device))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("the models could not be written")


def _time_engines(
    fleet: Fleet, carrier: Carrier, told: dict, shares: bool, out: Path, profiles: Table
) -> None:
    """Warm all engines together; the first time, fit what they told of their iterations."""
    carrier.drive({member.name: [[(8, 2)]] for member in fleet.members})
    if profiles.rows:
        return
    carrier.iterations.clear()
    carrier.drive({member.name: _waves(fleet, member) for member in fleet.members})
    for member in fleet.members:
        rows = np.array(carrier.iterations[member.name])
        path = out / f"fleet_iterations_{member.name}.csv"
        path.unlink(missing_ok=True)  # Of a run that ended before it had all profiles.
        table = Table(path, ITERATION_COLUMNS)
        table.add(*(dict(zip(ITERATION_COLUMNS, row, strict=True)) for row in rows.tolist()))
        found = fit_iterations(IterationProfile(rows[:, :3].T, rows[:, 3]))
        capacity, device = told[member.name]
        speeds = (max(found.base_s, 1e-9), *found.values.tolist()[1:])
        row = (
            member.name, member.model, device, member.mps_percent if shares else "",
            member.max_batch, member.token_budget, *speeds, capacity,
        )  # fmt: skip
        profiles.add(dict(zip(PROFILE, row, strict=True)))


def _waves(fleet: Fleet, member: Member) -> list[list[tuple[int, int]]]:
    """Batches of 1, 2, 4, .. sequences at three contexts."""
    sizes = [2**i for i in range(member.max_batch.bit_length()) if 2**i <= member.max_batch]
    contexts = (fleet.most_context // 16 + 1, fleet.most_context // 4, fleet.most_context // 2)
    return [[(context, fleet.wave_output)] * size for size in sizes for context in contexts]


def measured_profiles(profiles: Table) -> dict[str, EngineProfile]:
    """Return the profiles of the engines by name."""
    return {
        row["engine"]: EngineProfile(
            **{name: float(row[name]) for name in PROFILE[6:]}, max_batch=int(row["max_batch"]),
            token_budget=int(row["token_budget"]), source="measured",
        )
        for row in profiles.rows
    }  # fmt: skip


def _replay(fleet: Fleet, carrier: Carrier, profiles: Table, name: str) -> list[dict]:
    scenario, engines = load_scenario(fleet.scenario), measured_profiles(profiles)
    trace = traffic(fleet, scenario, list(engines.values()))
    predictor = length_predictor(load_model(scenario.workload))
    make_policy = partial(live_policy, name, scenario, len(engines))
    done = carrier.replay(trace, make_policy, engines, predictor.generated_tokens)
    return [_row(name, number, sent, done[0].due_s) for number, sent in enumerate(done)]


def _row(policy: str, number: int, sent: Sent, first_s: float) -> dict:
    row = (
        policy, number, sent.engine, sent.due_s - first_s, sent.context_tokens, sent.num_generated,
        sent.last_s - sent.due_s, sent.first_s - sent.due_s,
    )  # fmt: skip
    return dict(zip(REQUESTS, row, strict=True))


def _end(process, pipe) -> None:
    try:
        pipe.send(None)
        process.join(30)
    except OSError:
        pass
    finally:
        process.kill()
