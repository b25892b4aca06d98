from itertools import product

import pytest
from unit.gpu_kinds import GPU_KINDS

from tokenyard.perf.coefficients import batch_grid, linear_coefficients
from tokenyard.perf.replica import make_replica

LLMS = (
    "llama2_7b",
    "llama2_13b",
    "llama2_70b",
    "llama3_8b",
    "llama3_70b",
    "internlm_20b",
    "smollm2_135m",
)


def every_replica():
    for gpu, llm, t, p, precision in product(
        GPU_KINDS, LLMS, (1, 2, 4, 8), (1, 2), ("fp16", "fp8")
    ):
        if (llm == "smollm2_135m" and t > 1) or (precision == "fp8" and gpu.startswith("a1")):
            continue
        replica = make_replica(gpu, llm, t, p, precision)
        if replica.kv_capacity_tokens:
            yield replica


def test_linearity_costs_no_replica_of_the_tables_more_than_a_twelfth():
    fitted = [linear_coefficients(replica) for replica in every_replica()]
    assert len(fitted) == 354
    assert max(linear.max_error_fraction for linear in fitted) < 0.085
    assert max(linear.mean_error_fraction for linear in fitted) < 0.046


def test_the_grid_holds_nothing_that_the_replica_or_the_simulator_cannot():
    replica = make_replica("l4", "llama3_8b")
    prefill, sequences, cached = batch_grid(replica, max_sequences=64)
    assert (prefill + cached).max() <= replica.kv_capacity_tokens
    assert sequences.max() == 64
    assert (prefill + sequences).min() > 0


def test_longer_prompts_make_each_of_their_tokens_costlier():
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    short, long = (linear_coefficients(replica, prompt_tokens=n) for n in (256, 8192))
    assert long.prefill_token_s > 1.2 * short.prefill_token_s
    assert long.sequence_s == pytest.approx(short.sequence_s, rel=0.1)


def test_a_model_that_does_not_fit_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"does not fit on 1 a100_80g_sxm; take more GPUs or fp8"):
        linear_coefficients(make_replica("a100_80g_sxm", "llama2_70b"))
