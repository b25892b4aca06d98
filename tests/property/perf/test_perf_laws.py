"""Laws of the performance model, on any replica that can be built and any batch it can hold."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.gpu_kinds import GPU_KINDS, STEP_TIME_KINDS, precisions

from tokenyard.perf.coefficients import batch_grid, fit_linear, linear_coefficients
from tokenyard.perf.iteration import iteration_parts, iteration_s, layer_work
from tokenyard.perf.replica import make_replica
from tokenyard.perf.serving import (
    decode_s,
    prefill_s,
    throughput_tokens_per_s,
)

LLMS = ("llama2_7b", "llama2_13b", "llama2_70b", "llama3_8b", "internlm_20b", "smollm2_135m")


@st.composite
def replicas(draw, llms=LLMS, gpus=(*GPU_KINDS, *STEP_TIME_KINDS)):
    llm = draw(st.sampled_from(llms))
    degrees = (1,) if llm == "smollm2_135m" else (1, 2, 4, 8)
    gpu = draw(st.sampled_from(gpus))
    replica = make_replica(
        gpu,
        llm,
        tensor_parallel=draw(st.sampled_from(degrees)),
        pipeline_parallel=draw(st.sampled_from((1, 2, 4))),
        precision=draw(st.sampled_from(precisions(gpu))),
    )
    assume(replica.kv_capacity_tokens > 0)
    return replica


counts = st.integers(0, 4096)


@given(replica=replicas(), prefill=counts, sequences=counts, kv=st.integers(0, 10**6))
def test_no_more_work_is_ever_done_sooner(replica, prefill, sequences, kv):
    assume(prefill + sequences > 0)
    # Powers are rounded: equal to twelve digits is not sooner.
    base_s = iteration_s(replica, prefill, sequences, kv) * (1 - 1e-12)
    assert base_s > 0
    assert iteration_s(replica, prefill + 1, sequences, kv) >= base_s
    assert iteration_s(replica, prefill, sequences + 1, kv) >= base_s
    assert iteration_s(replica, prefill, sequences, kv + 1000) > base_s


@given(replica=replicas(), batch=st.lists(st.tuples(counts, counts, counts), min_size=1))
def test_batches_at_once_take_what_each_takes_alone(replica, batch):
    together = iteration_s(replica, *np.transpose(batch))
    np.testing.assert_allclose(together, [iteration_s(replica, *one) for one in batch], rtol=1e-12)


@given(replica=replicas())
def test_an_empty_batch_takes_no_time(replica):
    assert iteration_s(replica, 0, 0, 0) == 0


@given(replica=replicas(), tokens=st.integers(1, 8192))
def test_matrix_products_lie_between_the_longer_of_both_bounds_and_their_sum(replica, tokens):
    llm, kernels, p = replica.llm, replica.kernels, replica.pipeline_parallel
    work = layer_work(llm, replica.tensor_parallel, replica.precision)
    micro_batch = np.array(tokens / p)
    compute_s = work.operations_per_token * micro_batch / replica.flops_per_s
    compute_s = compute_s / kernels.compute_efficiency
    memory_s = work.traffic_bytes(micro_batch) / replica.memory_bytes_per_s
    memory_s = memory_s / kernels.memory_efficiency
    scale = replica.calibration.engine.overhead_scale
    parts = iteration_parts(replica, tokens, 0, 0)
    layer_s = parts.linear_s / llm.num_layers - kernels.linear_overhead_s * scale
    assert max(compute_s, memory_s) <= layer_s * (1 + 1e-9)
    assert layer_s <= (compute_s + memory_s) * (1 + 1e-9)


@given(
    gpu=st.sampled_from(("a100_80g_sxm", "h100_sxm", "h200_sxm")),
    llm=st.sampled_from(("llama2_7b", "llama2_13b", "llama2_70b")),
    tokens=st.integers(4096, 65536),
)
def test_over_nvlink_more_gpus_never_slow_a_batch_that_is_bound_by_arithmetic(gpu, llm, tokens):
    times = [prefill_s(make_replica(gpu, llm, tensor_parallel=t), tokens) for t in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


@given(replica=replicas(), sequences=st.integers(1, 255), context=st.integers(1, 4096))
def test_a_larger_batch_gives_more_tokens_at_a_longer_time_each(replica, sequences, context):
    few_s = decode_s(replica, sequences, context)
    more_s = decode_s(replica, sequences + 1, context)
    assert more_s >= few_s
    assert (sequences + 1) / more_s > sequences / few_s


@given(replica=replicas(), context=st.integers(1, 4000), generated=st.integers(1, 2000))
def test_throughput_never_exceeds_what_either_bound_allows(replica, context, generated):
    most = replica.max_sequences(context, generated)
    assume(most > 0)
    tokens_per_s = throughput_tokens_per_s(replica, most, context, generated)
    per_output = 2 * replica.llm.num_layers * replica.llm.layer_parameters
    per_output *= 1 + context / generated
    attained = replica.num_gpus * replica.flops_per_s * replica.kernels.compute_efficiency
    assert tokens_per_s * per_output < attained


@given(replica=replicas(gpus=GPU_KINDS))
def test_four_coefficients_are_not_negative_and_miss_no_batch_by_more_than_a_tenth(replica):
    linear = linear_coefficients(replica)
    four = (linear.iteration_s, linear.prefill_token_s, linear.sequence_s, linear.kv_token_s)
    assert min(four) >= 0
    assert linear.iteration_s > 0
    batches = batch_grid(replica)
    exact_s = iteration_s(replica, *batches, prefill_context_tokens=512)
    error = np.abs(linear.time_s(*batches) / exact_s - 1)
    assert error.max() == pytest.approx(linear.max_error_fraction)
    assert linear.max_error_fraction <= 0.10
    assert linear.mean_error_fraction <= 0.05


coefficient = st.floats(1e-9, 1e-3)


@given(four=st.tuples(coefficient, coefficient, coefficient, coefficient), seed=st.integers(0, 99))
def test_an_engine_that_is_linear_is_found_exactly(four, seed):
    batches = np.random.default_rng(seed).integers(1, 2000, (3, 60)).astype(float)
    linear = fit_linear(batches, four[0] + four[1:] @ batches)
    assert linear.max_error_fraction < 1e-6
