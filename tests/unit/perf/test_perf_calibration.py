"""A fit finds the parameters that measurements were made with, outliers or not."""

from dataclasses import replace

import numpy as np
import pytest

from tokenyard.perf.calibration import (
    collective_held_out_mape,
    fit_collective,
    fit_engine,
    fit_iterations,
    fit_kernels,
    fit_replica,
    held_out_third,
    iterations_held_out_mape,
    kernel_cross_validated_mape,
    kernel_transfer_mape,
    mape,
    predicted,
    with_engine,
)
from tokenyard.perf.coefficients import batch_grid
from tokenyard.perf.hardware import EngineOverhead, load_gpu, shipped_calibration
from tokenyard.perf.iteration import iteration_s
from tokenyard.perf.models import load_llm
from tokenyard.perf.profiles import (
    CollectiveProfile,
    IterationProfile,
    KernelProfile,
    read_iterations,
)
from tokenyard.perf.published import read_published
from tokenyard.perf.replica import make_replica

A100 = load_gpu("a100_80g_sxm")
TOKENS = np.unique(np.geomspace(1, 4096, 80).astype(int))


def with_outliers(time_s, rng):
    """Multiply all by a percent of noise, and one in twenty by three."""
    noisy = time_s * np.exp(0.01 * rng.standard_normal(time_s.shape))
    return np.where(rng.random(time_s.shape) < 0.05, 3 * noisy, noisy)


def synthetic_kernels(llm_name, t, rng):
    """Time a layer on a GPU that attains .7 and .8, with sharpness 2 and 30 us, by hand."""
    llm, n = load_llm(llm_name), TOKENS
    weights = llm.layer_parameters / t
    compute_s = 2 * weights * n / (312e12 * 0.7)
    h, f, kv = llm.hidden_size, llm.mlp_size, llm.kv_size
    values = n * (4 * h + (2 * h + 2 * kv + 3 * f) / t)
    memory_s = 2 * (weights + values) / (2039e9 * 0.8)
    linear_s = np.hypot(compute_s, memory_s) + 30e-6
    elementwise_s = 15e-6 + n * (20 * h + (4 * (h + kv) + 6 * f) / t) / (2039e9 * 0.5)
    return KernelProfile(
        llm_name, t, n, with_outliers(linear_s, rng), with_outliers(elementwise_s, rng)
    )


@pytest.fixture(scope="module")
def kernel_profiles():
    rng = np.random.default_rng(0)
    return [synthetic_kernels(llm, t, rng) for llm in ("llama2_7b", "llama2_70b") for t in (1, 4)]


def test_kernels_are_found_again_in_spite_of_outliers(kernel_profiles):
    kernels = fit_kernels(kernel_profiles, A100)
    assert kernels.compute_efficiency == pytest.approx(0.7, rel=0.02)
    assert kernels.memory_efficiency == pytest.approx(0.8, rel=0.02)
    assert kernels.sharpness == pytest.approx(2, rel=0.1)
    assert kernels.linear_overhead_s == pytest.approx(30e-6, rel=0.05)
    assert kernels.elementwise_overhead_s == pytest.approx(15e-6, rel=0.05)


def test_errors_on_held_out_kernels_are_those_of_the_noise(kernel_profiles):
    # One in twenty is off by two thirds of itself: 3 to 5 % in all.
    assert kernel_cross_validated_mape(kernel_profiles, A100) < 0.06
    assert kernel_transfer_mape(kernel_profiles, A100, "llama2_7b", "llama2_70b") < 0.06


def test_a_model_that_is_slower_than_its_shape_says_shows_in_the_held_out_error(kernel_profiles):
    slow = [
        replace(p, linear_s=2 * p.linear_s) if p.llm == "llama2_70b" else p for p in kernel_profiles
    ]
    assert kernel_transfer_mape(slow, A100, "llama2_7b", "llama2_70b") > 0.4


def test_a_collective_is_found_again_in_spite_of_outliers():
    rng = np.random.default_rng(1)
    size = np.geomspace(2**11, 2**26, 200)
    time_s = with_outliers(4e-5 + 1.5 * size / 2e11, rng)
    profile = CollectiveProfile(4, 4, size, time_s)
    fitted = fit_collective(profile, "all_reduce")
    assert fitted.latency_s == pytest.approx(4e-5, rel=0.02)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(2e11, rel=0.03)
    assert collective_held_out_mape(profile, "all_reduce") < 0.06


def test_an_engine_is_found_again_from_what_it_would_publish():
    engine = EngineOverhead(
        kv_efficiency=0.7,
        attention_efficiency=0.3,
        iteration_overhead_s=2e-3,
        overhead_scale=1.5,
    )
    truth = with_engine(shipped_calibration(), engine)
    figures = [figure for figure in read_published() if figure.role == "fitted"]
    made = [
        figure.model_copy(update={"published": value})
        for figure, value in zip(figures, predicted(figures, truth), strict=True)
    ]
    outlier = made[3].model_copy(update={"published": 2 * made[3].published})
    fitted = fit_engine([*made, outlier], shipped_calibration())
    assert fitted.model_dump() == pytest.approx(engine.model_dump(), rel=0.05)


OWN = (8e-3, 6e-5, 5e-5, 3e-7)


def own_engine(num_rows, rng):
    batches = np.stack(
        [rng.integers(0, 2048, num_rows), rng.integers(1, 256, num_rows), np.zeros(num_rows)]
    ).astype(float)
    batches[2] = batches[1] * rng.integers(50, 3000, num_rows)
    return IterationProfile(batches, with_outliers(OWN[0] + OWN[1:] @ batches, rng))


def test_an_iteration_is_found_again_in_spite_of_outliers():
    profile = own_engine(400, np.random.default_rng(2))
    linear = fit_iterations(profile)
    truth_s = OWN[0] + OWN[1:] @ profile.batches
    error = linear.time_s(*profile.batches) / truth_s - 1
    assert np.abs(error).max() < 0.03
    four = linear.iteration_s, linear.prefill_token_s, linear.sequence_s, linear.kv_token_s
    assert four == pytest.approx(OWN, rel=0.1)


def test_an_engine_without_prompts_in_its_iterations_gets_no_negative_coefficient():
    profile = own_engine(200, np.random.default_rng(3))
    profile.batches[0] = 0
    fixed_s = np.full(200, 0.01)
    linear = fit_iterations(IterationProfile(profile.batches, fixed_s))
    assert linear.iteration_s == pytest.approx(0.01, rel=1e-3)
    assert linear.prefill_token_s == 0
    assert min(linear.sequence_s, linear.kv_token_s) >= 0


def test_repetitions_of_a_batch_are_held_out_together():
    # Only the last batch shows what a cached token costs, which is most of its time: whoever has
    # not seen one of its repetitions is wrong about all of them.
    batches = np.array([(0, 1, 0), (500, 1, 0), (900, 50, 0), (2000, 9, 0), (0, 1, 10**6)], float)
    repeated = np.repeat(batches.T, 10, axis=1)
    time_s = OWN[0] + OWN[1:] @ repeated
    assert fit_iterations(IterationProfile(repeated, time_s)).max_error_fraction < 1e-3
    assert iterations_held_out_mape(IterationProfile(repeated, time_s)) > 0.15


def test_held_out_error_of_a_linear_engine_is_its_noise():
    profile = own_engine(300, np.random.default_rng(5))
    assert iterations_held_out_mape(profile) < 0.06
    with pytest.raises(ValueError, match="4 batch compositions cannot be held out in 5 folds"):
        iterations_held_out_mape(own_engine(4, np.random.default_rng(6)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "own.csv: No columns"),
        ("prefill_tokens,time_s\n1,1\n", r"\['decoding_sequences', 'kv_tokens'\] are missing"),
        ("prefill_tokens,decoding_sequences,kv_tokens,time_s\n1,1,1,.1\n0,0,5,.1\n", "line 3"),
        ("prefill_tokens,decoding_sequences,kv_tokens,time_s\n1,1,1,0\n", "line 2"),
        ("prefill_tokens,decoding_sequences,kv_tokens,time_s\n1,1,,.1\n", "line 2"),
    ],
)
def test_a_file_that_cannot_be_fitted_is_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_iterations(path)


def test_a_replica_fitted_to_its_iterations_predicts_those_held_out():
    shipped = make_replica("h100_sxm", "llama3_8b")
    kernels = shipped.kernels.model_copy(update={"memory_efficiency": 0.6, "sharpness": 3.0})
    engine = EngineOverhead(
        kv_efficiency=0.5, attention_efficiency=0.3, iteration_overhead_s=4e-3, overhead_scale=1.0
    )
    true = with_engine(
        shipped.calibration.model_copy(update={"kernels": {"h100": kernels}}), engine
    )
    batches = batch_grid(shipped)
    time_s = iteration_s(make_replica("h100_sxm", "llama3_8b", calibration=true), *batches)
    fitted, held_out = held_out_third(IterationProfile(batches, time_s))
    assert len(fitted.time_s) + len(held_out.time_s) == len(time_s)
    assert 0.25 < len(held_out.time_s) / len(time_s) < 0.4
    before = mape(iteration_s(shipped, *held_out.batches), held_out.time_s)
    found = replace(shipped, calibration=fit_replica(fitted, shipped))
    after = mape(iteration_s(found, *held_out.batches), held_out.time_s)
    assert before > 0.1
    assert after < 0.01


def test_three_batch_compositions_are_the_least_to_hold_a_third_out():
    few = IterationProfile(np.array([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]), np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="2 batch compositions"):
        held_out_third(few)
