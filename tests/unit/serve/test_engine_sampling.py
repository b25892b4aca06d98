"""Tokens are drawn from the nucleus of their softmax, by seed and position alone."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from serve_app.engines.sharded.sampling import GumbelDraws, drawn  # noqa: E402

SCORES = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def frequencies(num_draws=4000, **rules):
    counts = torch.zeros(4)
    for position in range(num_draws):
        counts[drawn(SCORES, seed=1, position=position, **rules).argmax()] += 1
    return (counts / num_draws).tolist()


def test_draws_follow_the_softmax_at_its_temperature():
    assert frequencies(temperature=1.0, top_p=1.0) == pytest.approx(
        [0.5, 0.3, 0.15, 0.05], abs=0.03
    )
    squares = [0.25, 0.09, 0.0225, 0.0025]
    expected = [square / sum(squares) for square in squares]
    assert frequencies(temperature=0.5, top_p=1.0) == pytest.approx(expected, abs=0.03)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    got = frequencies(temperature=1.0, top_p=0.7)
    assert got == pytest.approx([0.5 / 0.8, 0.3 / 0.8, 0, 0], abs=0.03)
    assert frequencies(num_draws=50, temperature=1.0, top_p=1e-9) == [1, 0, 0, 0]


def test_equal_seeds_and_positions_draw_alike_and_others_do_not():
    rules = {"temperature": 1.0, "top_p": 1.0}
    assert torch.equal(
        drawn(SCORES, seed=3, position=9, **rules), drawn(SCORES, seed=3, position=9, **rules)
    )
    assert not torch.equal(
        drawn(SCORES, seed=3, position=9, **rules), drawn(SCORES, seed=3, position=10, **rules)
    )
    assert not torch.equal(
        drawn(SCORES, seed=2**40 + 3, position=9, **rules),
        drawn(SCORES, seed=3, position=9, **rules),
    )


class State:
    def __init__(self, temperature, seed, num_prompt=5, num_generated=0):
        self.logit_processor_kwargs = {"temperature": temperature, "top_p": 1.0, "seed": seed}
        self.initial_tokens = [0] * num_prompt
        self.generated_tokens = [0] * num_generated


class Row:
    def __init__(self, state):
        self.state = state


def scores_of(*states):
    draws = GumbelDraws()
    argument = draws.prepare_tensor_args([Row(state) for state in states])
    return draws(SCORES.repeat(len(states), 1), argument)


def test_a_batch_may_mix_greedy_and_drawn_rows():
    scores = scores_of(State(0.0, 1), State(1.0, 1), State(1.0, 2))
    assert torch.equal(scores[0], SCORES)
    assert not torch.equal(scores[1], scores[2])


def test_a_row_that_was_pushed_out_goes_on_where_it_was():
    before = scores_of(State(1.0, 7, num_prompt=5, num_generated=4))
    after = scores_of(State(1.0, 7, num_prompt=9, num_generated=0))
    assert torch.equal(before, after)
    assert math.isfinite(before.max())
