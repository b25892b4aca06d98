"""What was fitted to NVIDIA's step times obeys the laws of steps."""

from itertools import product

import numpy as np
import pytest
from unit.gpu_kinds import STEP_TIME_KINDS

from tokenyard.perf.coefficients import linear_coefficients
from tokenyard.perf.hardware import calibration_of, load_gpu, step_time_calibrations
from tokenyard.perf.iteration import iteration_parts, iteration_s
from tokenyard.perf.replica import make_replica

TOKENS = np.array([64, 128, 256, 512, 1024, 2048, 4096, 8192])
SEQUENCES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 192, 256])
CONTEXTS = np.array([256, 512, 1024, 2048, 4096, 8192, 16384, 32768])

REPLICAS = [
    pytest.param(make_replica(gpu, llm, degree), id=f"{gpu}-{llm}")
    for gpu, (llm, degree) in product(STEP_TIME_KINDS, (("llama3_8b", 1), ("llama3_70b", 8)))
]
"""Every kind with the models that its coefficients were fitted to."""


def test_every_kind_ships_with_coefficients_that_say_where_they_are_from():
    assert len(STEP_TIME_KINDS) >= 5
    for name in STEP_TIME_KINDS:
        gpu = load_gpu(name)
        calibration = step_time_calibrations()[gpu.kernels]
        assert calibration_of(gpu) is calibration
        assert calibration.provenance.startswith("NVIDIA aiconfigurator-core 0.12.0 (Apache-2.0)")
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
