"""The closed forms of the performance model against the mechanisms they stand for, step by step."""

import numpy as np
import pytest

from tokenyard.perf.hardware import Collective
from tokenyard.perf.iteration import all_reduce_s, iteration_parts, iteration_s
from tokenyard.perf.models import load_llm
from tokenyard.perf.replica import Replica, make_replica
from tokenyard.perf.serving import (
    decode_s,
    lockstep_s,
    mixed_iteration_s,
    prefill_s,
)


def bubble_fraction(num_stages: int, num_micro_batches: int) -> float:
    """Share of a pipeline's time that its stages idle while it fills: (p - 1) / (m + p - 1).

    Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3.
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def chunked_prefill_s(replica: Replica, prompt_tokens: float, num_chunks: int) -> float:
    """Time to first token of one prompt sent through the pipeline in equal chunks, seconds.

    (m + p - 1) stage times; chunks attend to half of the prompt on average.
    """
    num_stages = replica.pipeline_parallel
    chunk = prompt_tokens / num_chunks
    round_s = iteration_s(replica, chunk * num_stages, 0, 0, prompt_tokens / 2)
    return float(round_s / num_stages * (num_chunks + num_stages - 1))


def pipeline_finish_s(num_stages: int, num_chunks: int, stage_s: float) -> float:
    """Push chunks through stages: each waits for its stage, and for itself in the stage before."""
    finish = np.zeros((num_stages + 1, num_chunks + 1))
    for stage in range(1, num_stages + 1):
        for chunk in range(1, num_chunks + 1):
            ready = max(finish[stage - 1, chunk], finish[stage, chunk - 1])
            finish[stage, chunk] = ready + stage_s
    return float(finish[-1, -1])


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(1, 1), (2, 1), (4, 1), (2, 8), (4, 16)])
def test_a_chunked_prompt_leaves_the_pipeline_when_its_last_chunk_does(num_stages, num_chunks):
    replica = make_replica("a100_80g_sxm", "llama2_13b", pipeline_parallel=num_stages)
    chunk = 4096 / num_chunks
    stage_s = float(iteration_s(replica, chunk * num_stages, 0, 0, 2048)) / num_stages
    expected = pipeline_finish_s(num_stages, num_chunks, stage_s)
    assert chunked_prefill_s(replica, 4096, num_chunks) == pytest.approx(expected)
    busy = num_chunks * stage_s / expected
    assert bubble_fraction(num_stages, num_chunks) == pytest.approx(1 - busy)


def test_one_chunk_is_the_whole_prompt():
    replica = make_replica("a100_80g_sxm", "llama2_13b", pipeline_parallel=4)
    assert chunked_prefill_s(replica, 1000, 1) == pytest.approx(float(prefill_s(replica, 1000)))


def test_a_pipeline_shortens_no_prompt_and_no_single_token_but_carries_more_of_them():
    one, four = (make_replica("a100_80g_sxm", "llama2_13b", pipeline_parallel=p) for p in (1, 4))
    assert prefill_s(four, 2048) >= prefill_s(one, 2048)
    assert decode_s(four, 4, 1000) >= decode_s(one, 1, 1000)
    busy_one, busy_four = (256 / float(decode_s(replica, 256, 100)) for replica in (one, four))
    assert busy_four > busy_one


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_a_ring_moves_its_traffic_in_two_rounds_of_shards(num_gpus):
    link = Collective(latency_s=1e-5, bandwidth_bytes_per_s=1e11)
    message_bytes = 8e6
    steps = [message_bytes / num_gpus / 1e11 for _ in range(2 * (num_gpus - 1))]
    assert all_reduce_s(link, num_gpus, np.array(message_bytes)) == pytest.approx(1e-5 + sum(steps))


def test_attention_counts_every_pair_of_a_token_and_one_before_it():
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    prompt, hidden = 512, replica.llm.hidden_size
    pairs = sum(position for position in range(1, prompt + 1))
    # Scores and weighted values: two products of h operations each, two operations per term.
    operations = 32 * pairs * 2 * 2 * hidden
    attained = 312e12 * replica.calibration.engine.attention_efficiency
    expected = operations / attained
    assert iteration_parts(replica, prompt, 0, 0).attention_s == pytest.approx(expected, rel=0.01)


def test_chunks_of_a_prompt_attend_as_much_as_the_prompt_at_once():
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    starts = np.arange(0, 2048, 256)
    chunks = iteration_parts(replica, np.full(8, 256), 0, 0, starts + 128)
    whole = iteration_parts(replica, 2048, 0, 0)
    assert chunks.attention_s.sum() == pytest.approx(float(whole.attention_s))


def test_a_batch_in_lockstep_takes_its_tokens_one_after_the_other():
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    contexts = 300 + np.arange(200) + 0.5
    steps_s = decode_s(replica, 16, contexts).sum() + prefill_s(replica, 300, 16)
    assert lockstep_s(replica, 16, 300, 200) == pytest.approx(float(steps_s), rel=1e-6)


def test_the_steady_state_of_continuous_batching_is_that_of_a_batch_stepped_by_hand():
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    sequences, context, generated = 32, 400, 64
    # One sequence ends and one starts every two iterations: ages are spread evenly.
    ages = np.arange(0, generated, generated / sequences)
    times = []
    for _ in range(4 * generated):
        prompts = np.count_nonzero(ages == 0)
        cached = (context + ages).sum()
        times.append(float(iteration_s(replica, prompts * context, sequences, cached, context / 2)))
        ages = (ages + 1) % generated
    mean_s = mixed_iteration_s(replica, sequences, context, generated)
    assert np.mean(times) == pytest.approx(mean_s, rel=0.03)


def test_decoding_alone_is_bound_by_reading_every_weight_once():
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    read_s = load_llm("llama2_7b").weight_bytes("fp16") / 2039e9
    assert read_s < decode_s(replica, 1, 1) < 2 * read_s
