"""The shipped models imitate their traces, quickly, and say what they are."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import ks_2samp

from tokenyard.workload.diurnal import Diurnal
from tokenyard.workload.model import WorkloadModel, load_model, model_names, poisson_arrivals
from tokenyard.workload.readers import find_trace, read_trace

NUM_TRAIN = {"azure_code": 5000, "azure_conv": 7000}
RECORDED = [pytest.param(name, marks=pytest.mark.recorded(name)) for name in NUM_TRAIN]


def rng(seed=0):
    return np.random.default_rng(seed)


def index_of_dispersion(arrival_s, window_s):
    """Variance over mean of the counts per window (Cox and Lewis 1966); 1 for a Poisson process."""
    edges = np.arange(0.0, arrival_s[-1], window_s)
    counts = np.histogram(arrival_s, edges)[0]
    return counts.var(ddof=1) / counts.mean()


def training_part(name):
    return read_trace(find_trace(name))[0].head(NUM_TRAIN[name])


def test_the_public_traces_ship_as_models():
    assert model_names() == ["azure_code", "azure_code_fifth", "azure_conv", "azure_conv_tenth"]


@pytest.mark.parametrize("name", NUM_TRAIN)
def test_a_shipped_model_names_its_source_and_uses_the_training_part_only(name):
    model = load_model(name)

    assert model.num_requests == NUM_TRAIN[name]
    assert f"first {NUM_TRAIN[name]} requests" in model.provenance
    assert "CC-BY 4.0" in model.provenance
    assert "Patel et al." in model.provenance


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="azure_code"):
        load_model("azure")


@pytest.mark.parametrize("name", RECORDED)
def test_synthetic_lengths_are_distributed_as_those_of_the_training_part(name):
    trace = training_part(name)
    context, generated = load_model(name).sample_lengths(100_000, rng())

    assert ks_2samp(context, trace.context_tokens).statistic < 0.025
    assert ks_2samp(generated, trace.generated_tokens).statistic < 0.025
    assert ks_2samp(context + generated, trace.total_tokens).statistic < 0.025


@pytest.mark.parametrize("name", NUM_TRAIN)
def test_synthetic_lengths_have_the_mean_that_loads_are_computed_from(name):
    model = load_model(name)
    context, generated = model.sample_lengths(400_000, rng())

    mean_total = model.mean_context_tokens + model.mean_generated_tokens_overall
    assert (context + generated).mean() == pytest.approx(mean_total, rel=0.01)


@pytest.mark.parametrize("name", RECORDED)
def test_the_long_run_rate_is_that_of_the_training_part(name):
    trace = training_part(name)

    # Within the last step of the chain, which the trace ends in the middle of.
    fitted = load_model(name).arrivals.mean_rate_per_s
    assert fitted == pytest.approx(trace.mean_rate_per_s, rel=2e-3)


@pytest.mark.parametrize("name", NUM_TRAIN)
@pytest.mark.parametrize("rate_per_s", [0.5, 6.0])
def test_a_requested_rate_is_the_long_run_rate(name, rate_per_s):
    arrival_s = load_model(name).sample_mmpp_arrivals(300_000, rate_per_s, rng())

    assert len(arrival_s) / arrival_s[-1] == pytest.approx(rate_per_s, rel=0.05)


def test_code_arrivals_are_bursty_and_poisson_arrivals_are_not():
    bursty_s = load_model("azure_code").sample_mmpp_arrivals(50_000, 3.0, rng())
    poisson_s = poisson_arrivals(50_000, 3.0, rng())

    assert index_of_dispersion(bursty_s, 10) > 30
    assert index_of_dispersion(poisson_s, 10) == pytest.approx(1, abs=0.2)


def test_equal_seeds_give_equal_traces_and_others_differ():
    model = load_model("azure_code")
    first, again, other = (model.generate(100, rng(seed)) for seed in (1, 1, 2))

    assert first.arrival_s.tobytes() == again.arrival_s.tobytes()
    assert first.context_tokens.tobytes() == again.context_tokens.tobytes()
    assert first.arrival_s.tobytes() != other.arrival_s.tobytes()


def test_another_rate_or_rhythm_leaves_the_lengths_as_they_were():
    model = load_model("azure_conv")
    plain = model.generate(500, rng(3))
    daily = model.generate(500, rng(3), rate_per_s=0.001, diurnal=Diurnal())

    assert plain.context_tokens.tolist() == daily.context_tokens.tolist()
    assert plain.generated_tokens.tolist() == daily.generated_tokens.tolist()


def test_predicting_outputs_from_contexts_beats_the_overall_mean():
    model = load_model("azure_conv")
    context, generated = model.sample_lengths(100_000, rng())

    error = np.var(generated - model.mean_generated_tokens(context))
    assert 1 - error / generated.var() > 0.5
    assert model.mean_generated_tokens(np.array([0, 10**9])).shape == (2,)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("arrivals", "dt_s"), 0, "greater than 0"),
        (("arrivals", "rates_per_s"), (1.0,), "states each"),
        (("arrivals", "stationary"), (0, 0, 0, 0, 0, 1.0), "not the stationary distribution"),
        (("arrivals", "rates_per_s"), (0.0,) * 6, "some must be positive"),
        (("arrivals", "gaps"), (0.0,) * 48, "mean of the gaps"),
        (("lengths", "bin_edges_tokens"), (), "1 rows"),
        (("lengths", "context_tokens"), (1.0,), "one value per probability"),
        (("colour",), "blue", "Extra inputs"),
    ],
)
def test_a_parameter_file_that_makes_no_sense_is_refused(path, value, reason):
    content = load_model("azure_code").model_dump()
    part = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value

    with pytest.raises(ValidationError, match=reason):
        WorkloadModel.model_validate(content)


def test_a_chain_that_can_fall_silent_for_ever_is_refused():
    content = load_model("azure_code").arrivals.model_dump()
    content |= {
        "rates_per_s": (0.0, 1.0),
        "transition": ((1.0, 0.0), (0.0, 1.0)),
        "stationary": (0.5, 0.5),
    }

    with pytest.raises(ValidationError, match="no arrival can ever come"):
        type(load_model("azure_code").arrivals).model_validate(content)


def test_streams_of_a_trace_in_whole_seconds_may_begin_in_a_state_without_arrivals():
    content = load_model("azure_code").arrivals.model_dump()
    content |= {
        "rates_per_s": (0.0, 2.0),
        "transition": ((0.5, 0.5), (0.5, 0.5)),
        "stationary": (0.5, 0.5),
        "gap_probabilities": (0.0, 0.5, 0.6, 1.0),
        "gaps": (0.0, 0.0, 20 / 9, 20 / 9),
    }
    arrivals = type(load_model("azure_code").arrivals).model_validate(content)
    model = load_model("azure_code").model_copy(update={"arrivals": arrivals})

    for seed in range(20):
        arrival_s = model.sample_mmpp_arrivals(500, None, rng(seed))
        assert np.isfinite(arrival_s).all()
        assert (np.diff(arrival_s) >= 0).all()
        assert arrival_s[-1] == pytest.approx(500.0, rel=0.4)


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("window_s", [1.0, 10.0, 60.0])
def test_nine_of_ten_synthetic_streams_bracket_the_dispersion_of_the_trace(name, window_s):
    trace, model = training_part(name), load_model(name)

    synthetic = [
        index_of_dispersion(model.sample_mmpp_arrivals(trace.num_requests, None, rng(i)), window_s)
        for i in range(60)
    ]
    low, high = np.quantile(synthetic, (0.05, 0.95))
    assert low < index_of_dispersion(trace.arrival_s, window_s) < high


@pytest.mark.recorded("azure_code")
def test_synthetic_gaps_are_closer_to_the_bursty_trace_than_poisson_gaps():
    trace, model = training_part("azure_code"), load_model("azure_code")
    gaps = np.diff(trace.arrival_s)

    synthetic_s = model.sample_mmpp_arrivals(20_000, None, rng())
    poisson_s = poisson_arrivals(20_000, trace.mean_rate_per_s, rng())
    assert ks_2samp(np.diff(synthetic_s), gaps).statistic < 0.13
    assert ks_2samp(np.diff(poisson_s), gaps).statistic > 0.4
