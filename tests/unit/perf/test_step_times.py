"""What was fitted to NVIDIA's step times obeys the laws of steps; their reader and fit work."""

import io
from itertools import product

import numpy as np
import pytest
from unit.gpu_kinds import STEP_TIME_KINDS

from tokenyard.perf.coefficients import linear_coefficients
from tokenyard.perf.hardware import calibration_of, load_gpu, step_time_calibrations
from tokenyard.perf.iteration import iteration_parts, iteration_s
from tokenyard.perf.replica import make_replica
from tokenyard.perf.step_times import (
    KINDS,
    StepErrors,
    StepTimes,
    fit_step_times,
    mean_calibration,
    read_step_times,
    split_third,
    step_ratios,
)

HEAD = (
    "system,model,tensor_parallel,prompts,prefill_tokens,cached_prompt_tokens,"
    "decoding_sequences,kv_tokens,time_ms\n"
)
LLAMA_8B = "meta-llama/Meta-Llama-3.1-8B"
TOKENS = np.array([64, 128, 256, 512, 1024, 2048, 4096, 8192])
SEQUENCES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 192, 256])
CONTEXTS = np.array([256, 512, 1024, 2048, 4096, 8192, 16384, 32768])


REPLICAS = [
    pytest.param(make_replica(gpu, llm, degree), id=f"{gpu}-{llm}")
    for gpu, (llm, degree) in product(STEP_TIME_KINDS, (("llama3_8b", 1), ("llama3_70b", 8)))
]
"""Every kind with the models that its coefficients were fitted to."""


def synthetic(system="h100_sxm", degrees=(1, 2), llms=("llama3_8b",)):
    """Steps exactly as the shipped coefficients have them."""
    prefill, decode, context = np.meshgrid([0, 64, 512, 4096], [0, 1, 16, 128], [256, 4096])
    decode, prefill, context = (axis.ravel().astype(float) for axis in (decode, prefill, context))
    batches = np.array([prefill > 0, prefill, 0 * prefill, decode, decode * context], float)
    batches = batches[:, prefill + decode > 0]
    calibration = calibration_of(load_gpu(KINDS[system].gpu))
    for llm, degree in product(llms, degrees):
        empty = StepTimes(system, llm, degree, batches, np.ones(batches.shape[1]))
        time_s = empty.predicted_s(empty.replica(calibration))
        yield StepTimes(system, llm, degree, batches, time_s)


def test_every_compared_kind_ships_with_coefficients_that_say_where_they_are_from():
    assert sorted(kind.gpu for kind in KINDS.values()) == STEP_TIME_KINDS
    assert len(STEP_TIME_KINDS) >= 5
    for system, kind in KINDS.items():
        gpu = load_gpu(kind.gpu)
        calibration = step_time_calibrations()[gpu.kernels]
        assert calibration_of(gpu) is calibration
        assert calibration.provenance.startswith("NVIDIA aiconfigurator-core 0.12.0 (Apache-2.0)")
        assert system in calibration.provenance
        assert set(calibration.links[gpu.link].all_reduce) == {2, 4, 8}


@pytest.mark.parametrize("gpu", STEP_TIME_KINDS)
def test_no_fitted_share_exceeds_what_the_hardware_has(gpu):
    calibration = calibration_of(load_gpu(gpu))
    kernels, engine = calibration.kernels[load_gpu(gpu).kernels], calibration.engine
    shares = (kernels.compute_efficiency, kernels.memory_efficiency)
    assert all(0.3 < share < 1 for share in (*shares, engine.kv_efficiency))
    assert 0.3 < engine.attention_efficiency < 1
    assert engine.attention_overhead_s > 0


@pytest.mark.parametrize("replica", REPLICAS)
def test_more_prompt_more_sequences_and_more_context_take_longer(replica):
    prompts = iteration_s(replica, TOKENS, 0, 0)
    assert (prompts > 0).all()
    assert (np.diff(prompts) > 0).all()
    decoding = iteration_s(replica, 0, SEQUENCES[:, None], SEQUENCES[:, None] * CONTEXTS)
    assert (decoding > 0).all()
    assert (np.diff(decoding, axis=0) > 0).all()
    assert (np.diff(decoding, axis=1) > 0).all()
    mixed = iteration_s(replica, TOKENS[:, None], SEQUENCES, SEQUENCES * 1024)
    assert (np.diff(mixed, axis=0) > 0).all()
    assert (np.diff(mixed, axis=1) > 0).all()


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_mixed_step_is_longer_than_either_part_and_shorter_than_both(replica):
    prompts = iteration_s(replica, TOKENS[:, None], 0, 0)
    decoding = iteration_s(replica, 0, SEQUENCES, SEQUENCES * 1024)
    mixed = iteration_s(replica, TOKENS[:, None], SEQUENCES, SEQUENCES * 1024)
    assert (mixed > np.maximum(prompts, decoding)).all()
    assert (mixed < prompts + decoding).all()


@pytest.mark.parametrize("replica", REPLICAS)
def test_four_coefficients_for_simulators_are_positive_and_near(replica):
    linear = linear_coefficients(replica)
    assert (linear.values > 0).all()
    assert linear.mean_error_fraction < 0.065
    assert linear.max_error_fraction < 0.22


def test_each_attention_of_a_step_costs_its_fixed_part_once_in_every_layer():
    replica = make_replica("h100_sxm_vllm", "llama3_8b")
    fixed_s = 32 * replica.calibration.engine.attention_overhead_s
    one_s = fixed_s / 1e9  # The work of a billionth of a token is no work.
    for prefill, decode in ((1e-9, 0), (0, 1), (1e-9, 1)):
        parts = iteration_parts(replica, prefill, decode, 0, 0)
        expected = fixed_s * ((prefill > 0) + (decode > 0))
        assert float(parts.attention_s + parts.kv_s) == pytest.approx(expected, abs=one_s)


def test_a_fit_finds_steps_that_follow_the_model():
    times = list(synthetic())
    ratio = step_ratios(times, fit_step_times(times))
    assert set(ratio) == {"all", "prefill", "decode", "mixed"}
    assert np.abs(ratio["all"] - 1).max() < 0.01


def test_a_fit_without_the_fixed_cost_of_attention_is_further_off():
    times = list(synthetic(degrees=(1,)))
    errors = [
        StepErrors.of(step_ratios(times, fit_step_times(times, attention_overhead=one))["all"])
        for one in (True, False)
    ]
    assert errors[0].p90_error_fraction < errors[1].p90_error_fraction


def test_a_third_is_fitted_and_the_rest_is_held_out_whatever_the_replica():
    times = list(synthetic(degrees=(1, 2, 4)))
    total = sum(one.time_s.size for one in times)
    fitted, held_out = split_third(times)
    assert sum(one.time_s.size for one in fitted) == -(-total // 3)
    for one, some, rest in zip(times, fitted, held_out, strict=True):
        assert sorted([*some.time_s, *rest.time_s]) == sorted(one.time_s)
    again, _ = split_third(times)
    other, _ = split_third(times, seed=1)
    assert [one.time_s.tolist() for one in again] == [one.time_s.tolist() for one in fitted]
    assert [one.time_s.tolist() for one in other] != [one.time_s.tolist() for one in fitted]


def test_steps_that_the_kv_cache_cannot_hold_are_left_out():
    small, large = f"l40s,{LLAMA_8B},1,0,0,0,8,8192,10", f"l40s,{LLAMA_8B},1,0,0,0,256,8388608,99"
    (times,) = read_step_times(io.StringIO(f"{HEAD}{small}\n{large}\n"))
    assert (times.llm, times.tensor_parallel) == ("llama3_8b", 1)
    assert times.time_s.tolist() == [0.01]
    assert times.steps.tolist() == ["decode"]


def test_a_prompt_token_attends_to_what_its_own_prompt_has_before_it():
    row = f"h100_sxm,{LLAMA_8B},1,4,512,4096,0,0,10"
    (times,) = read_step_times(io.StringIO(f"{HEAD}{row}\n"))
    replica = make_replica("h100_sxm_vllm", "llama3_8b")
    assert times.predicted_s(replica) == iteration_s(replica, 512, 0, 0, 1024 + 64)
    assert times.steps.tolist() == ["prefill"]


def test_systems_and_models_that_are_not_compared_are_refused_by_name():
    with pytest.raises(ValueError, match=r"unknown \['tpu'\]; known are \['a100_sxm'"):
        read_step_times(io.StringIO(f"{HEAD}tpu,{LLAMA_8B},1,0,0,0,8,8192,10\n"))


def test_the_mean_of_one_kind_is_that_kind_at_the_rates_of_another():
    of_h100 = calibration_of(load_gpu("h100_sxm_vllm"))
    derived = mean_calibration("mine", [of_h100])
    assert derived.kernels["mine"].model_dump() == pytest.approx(
        of_h100.kernels["h100_vllm"].model_dump()
    )
    assert derived.engine.model_dump() == pytest.approx(of_h100.engine.model_dump())


def test_errors_are_relative_and_a_bias_above_zero_is_too_slow():
    errors = StepErrors.of(np.array([1.1, 1.2, 0.7]))
    assert errors.median_error_fraction == pytest.approx(0.2)
    assert errors.bias_fraction == pytest.approx(0.1)
    assert errors.p90_error_fraction == pytest.approx(0.28)
