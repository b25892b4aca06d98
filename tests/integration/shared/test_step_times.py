"""The comparison with NVIDIA's step times, repeated where the wheel's environment is there."""

from pathlib import Path

import pytest
from scripts import ROOT

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def step_times(tmp_path_factory):
    """Steps of every system, as the wheel prints them now."""
    from benchmarks.step_times.__main__ import Args, load

    python = ROOT / Args().python
    if not python.exists():
        pytest.skip(
            f"{Args().python} is not there: benchmarks/step_times/__main__.py says how to make it"
        )
    csv = tmp_path_factory.mktemp("step_times") / "times.csv"
    return load(Args(python=python, times=csv))


def test_shipped_coefficients_are_within_the_bar_on_what_they_were_not_fitted_to(step_times):
    from tokenyard.perf.hardware import calibration_of, load_gpu
    from tokenyard.perf.step_times import KINDS, StepErrors, modelled, split_third, step_ratios

    assert len(step_times) >= 5
    for system, times in step_times.items():
        _, held_out = split_third(times)
        shipped = calibration_of(load_gpu(KINDS[system].gpu))
        after = StepErrors.of(step_ratios(held_out, shipped)["all"])
        gpu, calibration = modelled(system)
        before = StepErrors.of(step_ratios(held_out, calibration, gpu)["all"])
        assert after.median_error_fraction <= 0.08
        assert after.median_error_fraction < before.median_error_fraction
        assert after.p90_error_fraction < before.p90_error_fraction


def test_the_fit_of_today_is_the_one_that_ships(step_times):
    from tokenyard.perf.hardware import calibration_of, load_gpu
    from tokenyard.perf.step_times import KINDS, fit_step_times, split_third

    fitted, _ = split_third(step_times["h100_sxm"])
    shipped = calibration_of(load_gpu(KINDS["h100_sxm"].gpu))
    refitted = fit_step_times(fitted)
    for one in fitted:
        expected = one.predicted_s(one.replica(shipped))
        assert one.predicted_s(one.replica(refitted)) == pytest.approx(expected, rel=0.01)


def test_without_the_environment_the_benchmark_says_how_to_make_it(tmp_path):
    from benchmarks.step_times.__main__ import export

    with pytest.raises(SystemExit, match="make the environment as"):
        export(Path("no/such/python"), tmp_path / "times.csv")
