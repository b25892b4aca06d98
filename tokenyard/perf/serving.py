"""What follows from iterations: prompts, tokens, throughput."""

from __future__ import annotations

import numpy as np

from tokenyard.perf.iteration import Numbers, iteration_s
from tokenyard.perf.replica import Replica
from tokenyard.types import FloatArray


def prefill_s(replica: Replica, prompt_tokens: Numbers, num_prompts: Numbers = 1) -> FloatArray:
    """Time from start to first token of prompts that are processed together and alone, seconds.

    Through a pipeline they pass as one micro-batch: every stage waits for the one before.
    """
    prompt = np.asarray(prompt_tokens, float)
    tokens = prompt * np.asarray(num_prompts, float)
    # An iteration works on so many micro-batches; here each stage sees all tokens once.
    return iteration_s(replica, tokens * replica.micro_batches, 0, 0, prompt / 2)


def decode_s(replica: Replica, sequences: Numbers, context_tokens: Numbers) -> FloatArray:
    """Time per output token (TPOT) of sequences decoding together, seconds."""
    sequences = np.asarray(sequences, float)
    return iteration_s(replica, 0, sequences, sequences * np.asarray(context_tokens, float))


def mixed_iteration_s(
    replica: Replica, sequences: float, context_tokens: float, generated_tokens: float
) -> float:
    """Mean iteration of continuous batching in its steady state, seconds.

    Each of the sequences ends after `generated_tokens` iterations and a new prompt takes its
    place, so an iteration has sequences / generated prompts in it on average, beside the
    sequences that decode with half of their output done.
    """
    prompts = sequences / generated_tokens
    cached = sequences * (context_tokens + generated_tokens / 2)
    return float(
        iteration_s(replica, prompts * context_tokens, sequences, cached, context_tokens / 2)
    )


def lockstep_s(
    replica: Replica, sequences: float, context_tokens: float, generated_tokens: float
) -> float:
    """Time of a batch that starts together and ends together: prefill, then decoding, seconds."""
    mean_context = context_tokens + generated_tokens / 2
    first_s = prefill_s(replica, context_tokens, sequences)
    return float(first_s + generated_tokens * decode_s(replica, sequences, mean_context))


def throughput_tokens_per_s(
    replica: Replica, sequences: float, context_tokens: float, generated_tokens: float
) -> float:
    """Output tokens per second of continuous batching with so many sequences running."""
    return sequences / mixed_iteration_s(replica, sequences, context_tokens, generated_tokens)
