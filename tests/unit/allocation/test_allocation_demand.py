import copy

import numpy as np
import pytest

from tokenyard.allocation.demand import (
    CYCLES_PER_DAY,
    TRACE_SLOTS_PER_DAY,
    TRAIN_DAYS,
    VM_CPU_FILE,
    DemandStream,
    demand_source,
    fit_generator,
    harmonics,
    normalised,
    read_vm_cpu,
    shipped_generator,
)
from tokenyard.allocation.forecast import Forecaster, scenario_forecaster
from tokenyard.allocation.plans import load_allocation


def trace():
    return normalised(read_vm_cpu()["avg"].to_numpy())


@pytest.mark.recorded(VM_CPU_FILE)
def test_the_generator_that_ships_is_what_fitting_the_training_days_gives():
    shipped = shipped_generator()
    days = trace()[: TRAIN_DAYS * TRACE_SLOTS_PER_DAY]
    fitted = fit_generator(days, shipped.provenance, shipped.floor)
    assert fitted.profile == pytest.approx(shipped.profile, abs=1e-9)
    assert fitted.autoregression == pytest.approx(shipped.autoregression, abs=1e-9)
    assert fitted.innovation_std == pytest.approx(shipped.innovation_std, abs=1e-9)


@pytest.mark.recorded(VM_CPU_FILE)
def test_what_is_generated_has_the_spread_and_the_persistence_of_the_trace():
    real = trace()[: TRAIN_DAYS * TRACE_SLOTS_PER_DAY]
    drawn = shipped_generator().sample(200 * 288, np.random.default_rng(0), 288)
    assert drawn.mean() == pytest.approx(real.mean(), rel=0.1)
    assert drawn.std() == pytest.approx(real.std(), rel=0.2)
    lags = [np.corrcoef(one[1:], one[:-1])[0, 1] for one in (drawn, real)]
    assert lags[0] == pytest.approx(lags[1], abs=0.03)


def test_the_profile_knows_the_day_and_the_hour():
    assert harmonics(np.arange(5) / 288).shape == (5, 1 + 2 * len(CYCLES_PER_DAY))
    assert {24, 144} < set(CYCLES_PER_DAY)


def on_generated_demand(name):
    """A scenario whose demand needs no recorded file."""
    scenario = load_allocation(name)
    demand = scenario.demand.model_copy(update={"source": "generator"})
    return scenario.model_copy(update={"demand": demand})


def test_forecasts_err_by_less_than_the_last_slot_and_the_profile_do():
    scenario = load_allocation("a100x8_13b")
    stream = demand_source(scenario).test(0)
    forecasts = scenario_forecaster(scenario).forecast_all(stream)
    log = np.log(stream.per_s)
    ours = np.log(forecasts[stream.first :, 0]) - log[stream.first :]
    last = log[stream.first - 1 : -1] - log[stream.first :]
    assert ours.std() < 0.9 * last.std()


def test_nothing_is_learned_from_the_days_of_a_trace_that_choose_or_judge():
    scenario = on_generated_demand("a100x8_13b")
    exact = scenario.demand.model_copy(update={"noise": 0.0})
    source = copy.copy(demand_source(scenario.model_copy(update={"demand": exact})))
    source._trace = np.linspace(0.0, 1.0, 3000)  # Demand tells the slot.
    rng = np.random.default_rng(0)
    learned = [source.episode(50, rng).per_s.max() for _ in range(100)]
    learned.append(source.train(1, is_learned=True).per_s.max())
    choosing, judging = source.validation(1), source.test(1)
    assert max(learned) < choosing.per_s[choosing.first :].min()
    assert choosing.num_slots == 600
    assert judging.num_slots == 1000
    both = source.train(1).num_slots
    assert both == 2000
    assert choosing.start_slot == (both - choosing.num_slots - choosing.first) % 288


def test_a_forecaster_of_another_design_is_refused():
    forecaster = scenario_forecaster(load_allocation("a100x8_13b")).model_dump()
    with pytest.raises(ValueError, match="fit it anew"):
        Forecaster.model_validate({**forecaster, "profile": forecaster["profile"][:13]})


def test_a_load_without_a_rhythm_is_noticed():
    scenario = load_allocation("a100x8_13b")
    level, forecaster = 5.0, scenario_forecaster(scenario)
    flat = np.random.default_rng(0).poisson(level * scenario.slot_s, 144) / scenario.slot_s
    outlook = forecaster.outlook(flat, end_slot=144)
    assert outlook.median_per_s == pytest.approx(np.full(24, level), rel=0.04)
    assert outlook.spread.max() < 0.5 * min(forecaster.spread)
    # The regression alone goes on to expect an evening.
    assert np.abs(np.log(forecaster.forecast(flat, 144) / level)).max() > 0.06


def test_hours_without_a_request_do_not_hide_what_comes_after_them():
    """Half an hour later the outlook was a 250th of the demand, and the pool stayed smallest."""
    forecaster = scenario_forecaster(on_generated_demand("a100x8_13b"))
    outlook = forecaster.outlook([0.0] * 24 + [10.0] * 6, end_slot=30)
    # By night demand falls, but not to a tenth within two hours.
    assert outlook.median_per_s.min() > 1.0


def test_after_an_outage_and_where_demand_doubles_the_outlook_goes_by_what_comes():
    """The regression takes two hours for it: half of all requests violated their SLO meanwhile."""
    scenario = on_generated_demand("a100x8_13b")
    forecaster = scenario_forecaster(scenario)
    stream, at = demand_source(scenario).train(7), 3 * 288 + 100
    out, twice = (stream.per_s[: 4 * 288].copy() for _ in range(2))
    out[at - 24 : at] = 0.0
    twice[at:] *= 2.0
    for demand in (out, twice):
        changed = DemandStream(demand, 2 * 288, 0)
        alone = forecaster.forecast_all(changed)[at + 1 : at + 7, 0]
        ours = forecaster.outlook_all(changed).median_per_s[at + 1 : at + 7, 0]
        came = demand[at + 1 : at + 7]
        assert alone.mean() < 0.75 * came.mean()
        assert ours.mean() > 0.9 * came.mean()
        # What is planned on live is the same.
        for slot in (at + 1, at + 20, at + 30):
            live = forecaster.outlook(demand[:slot].tolist(), slot)
            whole = forecaster.outlook_all(changed)
            np.testing.assert_allclose(live.median_per_s, whole.median_per_s[slot], rtol=1e-9)


def test_on_training_days_the_outlook_is_the_regression():
    scenario = load_allocation("a100x8_13b")
    stream, forecaster = demand_source(scenario).train(0), scenario_forecaster(scenario)
    outlook, log = forecaster.outlook_all(stream), np.log(stream.per_s)
    assert np.abs(outlook.spread / forecaster.spread - 1.0).mean() < 0.05
    for horizon in (0, 5, 11):
        due = log[horizon:]
        rmse = [
            np.sqrt(np.square(due - np.log(one[: len(due), horizon])).mean())
            for one in (outlook.median_per_s, forecaster.forecast_all(stream))
        ]
        assert rmse[0] < 1.01 * rmse[1]
