"""The fitter finds what a known process was made of."""

import numpy as np
import pytest
from scipy.stats import poisson

from tokenyard.workload import fit
from tokenyard.workload.fit import MAX_STATES, fit_lengths, fit_mmpp, fit_own, fit_workload
from tokenyard.workload.model import Mmpp, load_model, poisson_arrivals
from tokenyard.workload.trace import Trace

EXPONENTIAL = -np.log1p(-np.append(np.linspace(0, 0.999, 400), 0.99999))


def arrivals_of_two_states(num_requests):
    gaps = EXPONENTIAL / np.trapezoid(EXPONENTIAL, np.append(np.linspace(0, 0.999, 400), 1))
    arrivals = Mmpp(
        dt_s=1.0,
        rates_per_s=(0.5, 8.0),
        transition=((0.95, 0.05), (0.15, 0.85)),
        stationary=(0.75, 0.25),
        gap_probabilities=(*np.linspace(0, 0.999, 400).tolist(), 1.0),
        gaps=tuple(gaps.tolist()),
    )
    model = load_model("azure_code").model_copy(update={"arrivals": arrivals})
    return model.sample_mmpp_arrivals(num_requests, None, np.random.default_rng(0))


def test_two_states_are_found_again_with_their_rates_and_moves():
    mmpp = fit_mmpp(arrivals_of_two_states(30_000), 1.0, 2).mmpp

    np.testing.assert_allclose(mmpp.rates_per_s, (0.5, 8.0), rtol=0.05)
    np.testing.assert_allclose(mmpp.stationary, (0.75, 0.25), atol=0.02)
    np.testing.assert_allclose(mmpp.transition, ((0.95, 0.05), (0.15, 0.85)), atol=0.015)


def test_the_criterion_prefers_the_true_number_of_states():
    arrival_s = arrivals_of_two_states(3000)

    bic = {k: fit_mmpp(arrival_s, 1.0, k, num_restarts=2, tolerance=1e-6).bic for k in (1, 2, 3)}
    assert min(bic, key=bic.get) == 2


def test_the_likelihood_of_one_state_is_that_of_independent_poisson_counts():
    arrival_s = poisson_arrivals(2000, 3.0, np.random.default_rng(0))
    fit = fit_mmpp(arrival_s, 1.0, 1)

    counts = np.bincount(arrival_s.astype(int))
    expected = poisson.logpmf(counts, counts.mean()).sum()
    assert fit.log_likelihood == pytest.approx(expected, rel=1e-6)


def test_the_fitted_rate_is_the_rate_of_the_trace():
    arrival_s = arrivals_of_two_states(2000)

    for num_states in (1, 2, 3):
        fit = fit_mmpp(arrival_s, 1.0, num_states, num_restarts=1, tolerance=1e-6)
        steps_s = fit.num_steps * 1.0
        assert fit.mmpp.mean_rate_per_s == pytest.approx(len(arrival_s) / steps_s, rel=1e-3)


def test_the_rate_is_that_of_the_trace_where_states_last_for_days():
    busy_s, calm_s = 182_000.0, 60_000.0
    busy = np.arange(0.0, busy_s, 0.5)
    calm = busy_s + np.arange(0.0, calm_s, 20.0)
    arrival_s = np.concatenate((busy, calm))

    mmpp = fit_mmpp(arrival_s, 1.0, 2, num_restarts=1).mmpp
    assert mmpp.rates_per_s == pytest.approx((0.05, 2.0), rel=1e-2)
    assert mmpp.mean_rate_per_s == pytest.approx(len(arrival_s) / (busy_s + calm_s), rel=1e-3)


def test_a_fit_is_the_same_every_time():
    arrival_s = arrivals_of_two_states(1000)

    assert fit_mmpp(arrival_s, 1.0, 2).mmpp == fit_mmpp(arrival_s, 1.0, 2).mmpp


def test_outputs_that_depend_on_the_context_still_do_in_the_tables():
    rng = np.random.default_rng(0)
    context = rng.integers(1, 1000, 20_000)
    generated = np.where(context < 500, 10, 200) + rng.integers(0, 5, 20_000)
    tables = fit_lengths(Trace(np.arange(20_000.0), context, generated))

    assert max(tables.generated_tokens[0]) < 15
    assert min(tables.generated_tokens[-1]) >= 200


def test_a_trace_of_equal_requests_can_be_fitted():
    same = np.full(200, 7)
    trace = Trace(np.arange(200.0), same, same)
    model = fit_workload(trace, "equal", "made up", dt_s=1.0, num_states=2)

    context, generated = model.sample_lengths(50, np.random.default_rng(0))
    assert set(context) == set(generated) == {7}
    assert model.mean_context_tokens + model.mean_generated_tokens_overall == 14


@pytest.mark.parametrize("arrival_s", [np.zeros(5), np.array([0.0]), np.array([0.0, 0.5])])
def test_arrivals_that_show_no_process_are_refused(arrival_s):
    with pytest.raises(ValueError, match=r"one instant|cannot tell"):
        fit_mmpp(arrival_s, 1.0, 2)


def test_a_trace_of_months_is_fitted_in_as_many_steps_as_one_of_hours(monkeypatch):
    seen = []

    def counted(counts, num_states, tolerance, rng):
        seen.append((len(counts), num_states))
        return fit_chain(counts, num_states, tolerance, rng)

    fit_chain = fit._fit_chain
    monkeypatch.setattr(fit, "_fit_chain", counted)
    monkeypatch.setattr(fit, "_MOST_STEPS", 100)
    arrival_s = np.sort(np.random.default_rng(0).uniform(0, 120 * 86_400, 500))
    arrival_s -= arrival_s[0]
    model = fit_own(Trace(arrival_s, np.full(500, 9), np.full(500, 2)), "mine", "", 1.0)

    assert {num_steps for num_steps, _ in seen} <= {100, 101}
    assert len(seen) == 8 * MAX_STATES, "each number of states is fitted once"
    assert model.arrivals.dt_s == pytest.approx(arrival_s[-1] / 100)
    assert model.arrivals.mean_rate_per_s == pytest.approx(500 / arrival_s[-1], rel=0.02)
