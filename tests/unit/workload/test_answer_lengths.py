"""Lengths of answers that are learned from traffic, against the tables that policies bring."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.workload.answer_lengths import AnswerFeatures, AnswerLengths
from tokenyard.workload.fit import fit_lengths
from tokenyard.workload.paths import find_trace
from tokenyard.workload.readers import read_trace
from tokenyard.workload.trace import Trace

LEVELS = np.array([0.1, 0.25, 0.5, 0.75, 0.9])
ROUTES = (b"/v1/chat/completions", b"/v1/completions", b"/v1/responses")


def traffic(seed, num_requests=5000, num_tenants=6):
    """Requests of tenants with two kinds of request each, whose answers change twice."""
    rng = np.random.default_rng(seed)
    kinds = [
        {
            "route": ROUTES[rng.integers(3)], "max_tokens": int(rng.choice([0, 256, 1024, 4096])),
            "prompt": rng.normal(6.5, 1.0), "spread": rng.uniform(0.3, 1.2),
            "answer": rng.normal(5.0, 1.0), "noise": rng.uniform(0.3, 1.0),
            "slope": rng.normal(0.0, 0.3),
        }
        for _ in range(2 * num_tenants)
    ]  # fmt: skip
    shares = 1.0 / np.arange(1, num_tenants + 1)
    requests = []
    for number in range(num_requests):
        if number in (num_requests // 3, 2 * num_requests // 3):
            for kind in kinds[:: 1 + int(rng.integers(2))]:
                kind["answer"] = rng.normal(5.0, 1.0)
        tenant = int(rng.choice(num_tenants, p=shares / shares.sum()))
        kind = kinds[2 * tenant + int(rng.integers(2))]
        above = kind["spread"] * rng.normal()
        answer = kind["answer"] + kind["slope"] * above + kind["noise"] * rng.normal()
        tokens = max(round(math.exp(answer)), 1)
        features = AnswerFeatures(
            max(round(math.exp(kind["prompt"] + above)), 1), kind["max_tokens"], "m",
            kind["route"], f"tenant {tenant}",
        )  # fmt: skip
        requests.append((features, min(tokens, kind["max_tokens"] or tokens)))
    return requests


class Table:
    """Quantiles and mean by prompt length, as the artifact of a policy has them."""

    def __init__(self, requests):
        prompts, tokens = (
            np.array(column, dtype=np.int64) for column in zip(*requests, strict=True)
        )
        arrivals = np.arange(len(tokens), dtype=float)
        self.lengths = fit_lengths(Trace(arrivals, prompts, tokens))

    def row(self, prompt_tokens):
        return int(np.searchsorted(self.lengths.bin_edges_tokens, prompt_tokens))

    def mean(self, prompt_tokens):
        return self.lengths.mean_generated_tokens[self.row(prompt_tokens)]

    def quantiles(self, prompt_tokens):
        row = self.lengths.generated_tokens[self.row(prompt_tokens)]
        return np.interp(LEVELS, self.lengths.generated_probabilities, row)


def quantile_loss(tokens, quantiles):
    """Mean of the pinball loss over levels (Koenker and Bassett 1978)."""
    difference = tokens - quantiles
    return np.maximum(LEVELS * difference, (LEVELS - 1.0) * difference).mean()


def losses(requests, num_learned):
    """Quantile losses on the rest: of what is learned while it goes on, and of the table."""
    first = [(f.prompt_tokens, tokens) for f, tokens in requests[:num_learned]]
    table, lengths, own, tables = Table(first), AnswerLengths(), 0.0, 0.0
    for number, (features, tokens) in enumerate(requests):
        prior = table.mean(features.prompt_tokens)
        if number >= num_learned:
            quantiles = lengths.quantiles_tokens(LEVELS, features, prior)
            own += quantile_loss(tokens, quantiles)
            tables += quantile_loss(tokens, table.quantiles(features.prompt_tokens))
        lengths.observe(features, tokens, prior, float(number))
    count = len(requests) - num_learned
    return own / count, tables / count


def test_of_tenants_whose_answers_change_it_is_a_fifth_better_than_a_table():
    ratios = [own / table for own, table in (losses(traffic(s), 1000) for s in range(5101, 5107))]
    assert np.mean(ratios) < 0.8
    assert max(ratios) < 1.0


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.recorded(name)) for name in ("azure_code", "azure_conv")],
)
def test_on_recorded_requests_it_is_no_worse_than_a_table_of_their_first_half(name):
    trace, _ = read_trace(find_trace(name))
    num = min(trace.num_requests, 12_000)
    prompts, tokens = trace.context_tokens[:num], trace.generated_tokens[:num]
    requests = [(AnswerFeatures(int(p)), int(t)) for p, t in zip(prompts, tokens, strict=True)]
    own, table = losses(requests, num // 2)
    assert own <= table


def test_the_table_counts_until_something_better_is_known_and_where_it_is_better():
    features, lengths = AnswerFeatures(100), AnswerLengths()
    assert lengths.expected_tokens(features, 300.0) == 300.0
    for number in range(100):
        lengths.observe(features, 40, 300.0, float(number))
    assert lengths.expected_tokens(features, 300.0) < 80.0
    # From here on only the table knows that answers are as long as prompts.
    rng = np.random.default_rng(0)
    for number in range(400):
        tokens = int(rng.integers(1, 20_000))
        lengths.observe(AnswerFeatures(100, tenant="b"), tokens, float(tokens), 100.0 + number)
    assert not lengths.is_better
    assert lengths.expected_tokens(features, 300.0) == 300.0


def test_what_was_predicted_hours_ago_does_not_count():
    features, lengths = AnswerFeatures(100), AnswerLengths()
    for number in range(100):
        lengths.observe(features, 40, 300.0, float(number))
    for number in range(20):
        lengths.observe(features, 300, 300.0, 1e6 + number)
    assert not lengths.is_better


def test_a_change_is_learned_within_a_hundred_answers():
    features, lengths = AnswerFeatures(100), AnswerLengths()
    for number in range(3000):
        lengths.observe(features, 50, 50.0, float(number))
    for number in range(100):
        lengths.observe(features, 800, 50.0, 3000.0 + number)
    assert lengths.mean_tokens(features, 50.0) > 600.0


def test_many_tenants_take_bounded_memory():
    lengths = AnswerLengths()
    for number in range(12_000):
        lengths.observe(AnswerFeatures(100, tenant=str(number)), 50, 50.0, float(number))
    assert len(lengths._groups) <= 4096


answers = st.lists(
    st.tuples(
        st.builds(
            AnswerFeatures, st.integers(0, 10**6), st.sampled_from([0, 1, 100, 10**6]),
            st.sampled_from("ab"), st.sampled_from(ROUTES), st.sampled_from("xyz"),
        ),
        st.integers(0, 10**6), st.floats(1.0, 1e5), st.floats(0.0, 1e6),
    ),
    min_size=1, max_size=60,
)  # fmt: skip


@given(answers)
def test_means_lie_between_what_was_seen_and_expected_and_quantiles_increase(answers):
    lengths = AnswerLengths()
    for features, tokens, prior, now_s in answers:
        lengths.observe(features, tokens, prior, now_s)
    seen = [max(tokens, 1) for _, tokens, _, _ in answers]
    for features, _, prior, _ in answers:
        mean = lengths.mean_tokens(features, prior)
        assert min(*seen, prior) * (1 - 1e-9) <= mean <= max(*seen, prior) * (1 + 1e-9)
        quantiles = lengths.quantiles_tokens(LEVELS, features, prior)
        assert np.isfinite(quantiles).all()
        assert (np.diff(quantiles) >= 0).all()


def test_ten_thousand_answers_overflow_nothing():
    features, lengths = AnswerFeatures(100), AnswerLengths()
    for number in range(20_000):
        lengths.observe(features, 1 + number % 90, 50.0, float(number))
    assert 35.0 < lengths.mean_tokens(features, 50.0) < 56.0
    assert math.isfinite(lengths.quantiles_tokens([0.5], features, 50.0)[0])
