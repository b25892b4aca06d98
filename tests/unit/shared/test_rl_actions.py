"""Actions as columns: drawn, weighed and handed on as RLlib does it, and always within bounds."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.core.models.catalog import Catalog
from ray.rllib.utils.spaces.space_utils import unsquash_action
from scipy import stats
from torch.distributions import kl_divergence

from tokenyard.rl.columnar.actions import DiscreteActions, actions_of

SPACES = {
    "choice": Discrete(4),
    "interval": Box(np.float32([-3.0, 0.0]), np.float32([1.0, 8.0])),
    "counted_from_one": Discrete(8, start=1),
}
spaces = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def rllibs_distribution(space, inputs):
    """What RLlib makes of a network's outputs."""
    maker = Catalog._get_dist_cls_from_action_space(space, framework="torch")
    return maker.from_logits(inputs)


def as_rllib(actions, kept):
    """Columns as RLlib's actions, before they are scaled to the space."""
    return actions.long() if isinstance(kept, DiscreteActions) else actions


def some_inputs(kept, num=200, seed=0, ruled_out=True):
    """Outputs of a network; now and then an alternative is ruled out."""
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn((num, kept.num_inputs), generator=rng)
    if ruled_out and isinstance(kept, DiscreteActions):
        inputs[::3, 1] = -torch.inf
    return inputs


def drawn(kept, inputs, seed=1):
    noise = kept.noise(inputs.shape[:-1], torch.Generator().manual_seed(seed))
    return kept.draw(inputs, noise)


@spaces
def test_log_probabilities_entropies_and_divergences_are_those_of_rllib(space):
    kept = actions_of(space)
    inputs, newer = some_inputs(kept), some_inputs(kept, seed=5)
    actions = drawn(kept, inputs)
    ours, theirs = kept.distribution(inputs), rllibs_distribution(space, inputs)
    new, their_new = kept.distribution(newer), rllibs_distribution(space, newer)
    close = {"rtol": 1e-5, "atol": 1e-5}
    taken = as_rllib(actions, kept)
    torch.testing.assert_close(ours.log_prob(actions), theirs.logp(taken), **close)
    torch.testing.assert_close(new.log_prob(actions), their_new.logp(taken), **close)
    torch.testing.assert_close(ours.entropy(), theirs.entropy(), **close)
    torch.testing.assert_close(kl_divergence(ours, new), theirs.kl(their_new), **close)


@spaces
def test_what_the_environment_gets_is_what_rllib_would_hand_it(space):
    kept = actions_of(space)
    actions = drawn(kept, some_inputs(kept, ruled_out=False))
    found = kept.for_env(actions.numpy())
    theirs = as_rllib(actions, kept)
    for row in range(0, 200, 20):
        expected = unsquash_action(theirs[row].numpy(), space)
        if isinstance(space, Discrete):  # RLlib counts every choice from 0.
            expected = expected + space.start
        np.testing.assert_allclose(found[row], expected, rtol=1e-6)


@given(seed=st.integers(0, 1000), spread=st.floats(0.0, 50.0))
def test_whatever_is_drawn_lies_within_the_space(seed, spread):
    for space in SPACES.values():
        kept = actions_of(space)
        inputs = spread * some_inputs(kept, 8, seed)
        actions = drawn(kept, inputs.nan_to_num(nan=-torch.inf), seed)
        batch = kept.for_env(actions.numpy())
        for row in range(8):
            assert space.contains(batch[row]), (space, batch[row])


def test_the_largest_of_logits_and_gumbel_noise_is_a_draw_from_their_softmax():
    logits = torch.tensor([0.3, -1.0, 1.2, -torch.inf])
    found = np.bincount(drawn(DiscreteActions(4), logits.expand(20_000, 4), seed=0), minlength=4)
    expected = torch.softmax(logits.double(), -1).numpy() * 20_000
    assert found[3] == 0
    assert stats.chisquare(found[:3], expected[:3]).pvalue > 0.01


def test_numbers_beyond_the_bounds_are_set_to_them_and_counted():
    kept = actions_of(Box(0.0, 1.0, (1,), np.float32))
    actions = np.float32([[-1.5], [-1.0], [0.5], [7.0]])
    assert kept.clipped(actions).tolist() == [True, False, False, True]
    assert kept.for_env(actions).ravel().tolist() == [0.0, 0.0, 0.75, 1.0]


@pytest.mark.parametrize(
    "space",
    [
        Box(0.0, np.inf, (2,), np.float32),
        Box(0, 9, (2,), np.int64),
        Box(0.0, 1.0, (2, 2), np.float32),
        gymnasium.spaces.MultiBinary(3),
        Dict({"a": Discrete(2)}),
    ],
    ids=str,
)
def test_spaces_that_are_no_columns_are_refused_in_words(space):
    with pytest.raises(ValueError, match="are not kept as columns; take Discrete"):
        actions_of(space)
