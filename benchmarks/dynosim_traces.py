"""Cells, traces and speeds that DynoSim and our simulator are both given."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenyard.routing.fleet import Fleet, ReplicaConfig
from tokenyard.routing.scenario import Arrivals, RewardWeights, Scenario
from tokenyard.types import FloatArray
from tokenyard.workload.model import load_model
from tokenyard.workload.sessions import Sessions
from tokenyard.workload.trace import Trace

BLOCK_TOKENS = 16
"""Of a page and of a prefix block, in both."""
MAX_BATCH = 256
TOKEN_BUDGET = 2048
GPU, MODEL = "h100_sxm_vllm", "llama3_8b"
"""Every replica's: NVIDIA's step times, as fitted (docs/results/performance-model.md)."""
SHARED: dict[str, Sessions] = {
    "none": Sessions(mean_turns=1, system_prompt_tokens=0, mean_message_tokens=1000),
    "half": Sessions(mean_turns=3, system_prompt_tokens=0, mean_message_tokens=500),
    "most": Sessions(mean_turns=6, system_prompt_tokens=1024, mean_message_tokens=150),
}
"""How much of a prompt others have had before: conversations, and system prompts."""
LOADS = (0.4, 0.7, 0.95)
"""Of what the replicas can do with nothing cached."""
REPLICAS = (2, 4, 8)
OUTPUTS = ("azure_conv", "azure_code")
"""Whose output lengths answers have: long ones (211 tokens) and short ones (28)."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    shared: str
    """A key of `SHARED`."""
    load: float
    num_replicas: int
    outputs: str

    @property
    def name(self) -> str:
        """Its levels, in words."""
        return f"{self.shared}-{self.load:g}-{self.num_replicas}-{self.outputs}"


def drawn_cells(count: int, seed: int) -> list[Cell]:
    """Draw different cells of the grid, in the grid's order."""
    grid = [Cell(*levels) for levels in itertools.product(SHARED, LOADS, REPLICAS, OUTPUTS)]
    chosen = np.random.default_rng(seed).choice(len(grid), count, replace=False)
    return [grid[index] for index in sorted(chosen)]


def scenario_of(cell: Cell) -> Scenario:
    """The cell as a scenario of ours, whose router sees every replica as it is now."""
    replicas = tuple(
        ReplicaConfig(
            name=f"replica-{which}", gpu=GPU, model=MODEL, max_batch=MAX_BATCH,
            token_budget=TOKEN_BUDGET,
        ) for which in range(cell.num_replicas)
    )  # fmt: skip
    return Scenario(
        name=cell.name, description="A cell of the comparison with DynoSim.",
        fleet=Fleet(
            replicas=replicas, page_tokens=BLOCK_TOKENS, prefix_block_tokens=BLOCK_TOKENS,
            queue_limit=100_000,
        ),
        workload=cell.outputs, sessions=SHARED[cell.shared], arrivals=Arrivals(load=cell.load),
        reward=RewardWeights(processing=0, queue=0, overload=0, balance=0),
    )  # fmt: skip


def trace_of(scenario: Scenario, num_requests: int, rng: np.random.Generator) -> Trace:
    """Draw a cell's requests, whose chains end with the prompt: DynoSim knows no answer's text."""
    assert scenario.sessions is not None
    rate_per_s = scenario.rate_per_s(sum(scenario.mean_lengths_tokens))
    model = load_model(scenario.workload)
    trace = scenario.sessions.generate(num_requests, rng, rate_per_s, model, BLOCK_TOKENS)
    assert trace.prefix_hashes is not None
    prompts = tuple(
        chain[: int(context) // BLOCK_TOKENS]
        for chain, context in zip(trace.prefix_hashes, trace.context_tokens, strict=True)
    )
    return Trace(
        trace.arrival_s, trace.context_tokens, trace.generated_tokens,
        prefix_hashes=prompts, prefix_block_tokens=BLOCK_TOKENS,
    )  # fmt: skip


def mooncake_lines(trace: Trace) -> Iterator[str]:
    """Tell a trace as Mooncake's JSON lines, one per request, in milliseconds.

    A block that is not whole is nobody else's: it has a number of its own, as have whole blocks of
    a trace that publishes no prefixes.
    """
    size = trace.prefix_block_tokens or BLOCK_TOKENS
    chains = trace.prefix_hashes or ((),) * trace.num_requests
    known: dict[int, int] = {}
    fresh = itertools.count(sum(map(len, chains)))
    columns = (trace.arrival_s, trace.context_tokens, trace.generated_tokens)
    for chain, arrival_s, context, generated in zip(
        chains, *(column.tolist() for column in columns), strict=True
    ):
        blocks = [known.setdefault(block, len(known)) for block in chain[: -(-context // size)]]
        blocks += [next(fresh) for _ in range(-(-context // size) - len(blocks))]
        yield json.dumps(
            {
                "timestamp": arrival_s * 1e3, "input_length": context,
                "output_length": generated, "hash_ids": blocks,
            }
        )  # fmt: skip


def timing_tables(iteration: FloatArray) -> dict[str, FloatArray]:
    """Tell the four coefficients of an iteration as the tables that DynoSim interpolates.

    It adds the time of prompt tokens to that of decoding, which it looks up by the tokens of KV
    read and the mean context. Their quotient is the number of sequences. The fixed cost of an
    iteration has to be in one of the two, and is in decoding: an iteration without it lacks the
    cost (docs/results/dynosim.md).

    Args:
        iteration: Seconds per iteration, prefill token, decoding sequence and KV token, shape (4,).

    Returns:
        Arrays by DynoSim's names, in tokens and milliseconds.
    """
    fixed, prefill, sequence, kv = iteration * 1e3
    tokens = np.array([0.0, 1e6])
    read = np.array([0.0, 1e7])
    context = np.geomspace(1.0, 1e6, 2000)
    return {
        "prefill_isl": tokens,
        "prefill_ttft_ms": prefill * tokens,
        "decode_active_kv_tokens": read,
        "decode_context_length": context,
        "decode_itl": fixed + kv * read[:, None] + sequence * read[:, None] / context,
    }


def engine_of(scenario: Scenario, folder: Path) -> dict[str, object]:
    """DynoSim's engine that is as fast and as large as the scenario's replicas.

    Args:
        scenario: Whose replicas are equal.
        folder: Where the tables are written.
    """
    replica = scenario.required_fleet.replicas[0]
    path = folder / "timing.npz"
    np.savez(path, **timing_tables(replica.iteration))
    config = {"path": str(path)}
    return {
        "backend": "vllm", "num_gpu_blocks": int(replica.kv_capacity_tokens // BLOCK_TOKENS),
        "block_size": BLOCK_TOKENS, "max_num_seqs": replica.max_batch,
        "max_num_batched_tokens": replica.token_budget, "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "timing_model": {"type": "external", "provider": "dynamo_profile", "config": config},
    }  # fmt: skip
