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

MEMORY = Box(0.0, 1.0, (1,), np.float32)
SPACES = {
    "choice": Discrete(4),
    "interval": Box(np.float32([-3.0, 0.0]), np.float32([1.0, 8.0])),
    "hybrid": Dict({"shape": Discrete(5), "memory_fraction": MEMORY, "max_batch": Discrete(2)}),
    "counted_from_one": Dict({"num_gpus": Discrete(8, start=1), "memory_fraction": MEMORY}),
    "nested": Dict({"b": Dict({"x": MEMORY, "y": Discrete(3)}), "a": Discrete(2)}),
}
spaces = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def rllibs_distribution(space, inputs):
    """What RLlib makes of a network's outputs."""
    maker = Catalog._get_dist_cls_from_action_space(space, framework="torch")
    return maker.from_logits(inputs)


def as_rllib(actions, kept):
    """Columns as RLlib's nested actions, before they are scaled to the space."""
    if not hasattr(kept, "parts"):
        return actions.long() if isinstance(kept, DiscreteActions) else actions
    return {
        name: as_rllib(actions[..., place], part)
        for name, part, place in zip(kept.names, kept.parts, kept.columns, strict=True)
    }


def some_inputs(kept, num=200, seed=0, ruled_out=True):
    """Outputs of a network; now and then an alternative is ruled out."""
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn((num, kept.num_inputs), generator=rng)
    if ruled_out and isinstance(kept, DiscreteActions):
        inputs[::3, 1] = -torch.inf
    return inputs


def drawn(kept, inputs, seed=1):
    noise = kept.noise(inputs.shape[:-1], torch.Generator().manual_seed(seed))
    assert noise.shape[-1] == kept.num_noise
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
        one = torch.utils._pytree.tree_map(lambda a, row=row: a[row].numpy(), theirs)
        ours = torch.utils._pytree.tree_map(lambda a, row=row: a[row], found)
        expected = unsquash_action(one, rllib_struct(space))
        torch.utils._pytree.tree_map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, counted(expected, space)
        )


def rllib_struct(space):
    if isinstance(space, Dict):
        return {name: rllib_struct(part) for name, part in space.spaces.items()}
    return space


def counted(action, space):
    """RLlib counts every choice from 0."""
    if isinstance(space, Dict):
        return {name: counted(action[name], part) for name, part in space.spaces.items()}
    return action + space.start if isinstance(space, Discrete) else action


@given(seed=st.integers(0, 1000), spread=st.floats(0.0, 50.0))
def test_whatever_is_drawn_lies_within_the_space(seed, spread):
    for space in SPACES.values():
        kept = actions_of(space)
        inputs = spread * some_inputs(kept, 8, seed)
        actions = drawn(kept, inputs.nan_to_num(nan=-torch.inf), seed)
        batch = kept.for_env(actions.numpy())
        for row in range(8):
            one = torch.utils._pytree.tree_map(lambda a, row=row: a[row], batch)
            assert space.contains(one), (space, one)


def test_the_largest_of_logits_and_gumbel_noise_is_a_draw_from_their_softmax():
    logits = torch.tensor([0.3, -1.0, 1.2, -torch.inf])
    found = np.bincount(drawn(DiscreteActions(4), logits.expand(20_000, 4), seed=0), minlength=4)
    expected = torch.softmax(logits.double(), -1).numpy() * 20_000
    assert found[3] == 0
    assert stats.chisquare(found[:3], expected[:3]).pvalue > 0.01


def test_parts_of_a_hybrid_action_follow_their_own_distributions_independently():
    kept = actions_of(SPACES["hybrid"])
    # By name: two limits of the batch, mean and logarithm of the spread, five shapes.
    inputs = torch.tensor([1.0, 0.0, 0.4, -0.7, 0.0, 1.0, -torch.inf, 0.5, 0.0])
    limits, memory, shapes = drawn(kept, inputs.expand(20_000, 9)).numpy().T
    assert stats.kstest(memory, stats.norm(0.4, np.exp(-0.7)).cdf).pvalue > 0.01
    share = torch.softmax(inputs[4:].double(), -1).numpy() * 20_000
    found = np.bincount(shapes.astype(int), minlength=5)
    assert found[2] == 0
    kept_shapes = [0, 1, 3, 4]
    assert stats.chisquare(found[kept_shapes], share[kept_shapes]).pvalue > 0.01
    together = np.corrcoef([limits, memory, shapes])
    assert np.abs(together - np.eye(3)).max() < 0.03


def test_numbers_beyond_the_bounds_are_set_to_them_and_counted():
    kept = actions_of(SPACES["hybrid"])
    actions = np.float32([[0, -1.5, 3], [1, -1.0, 0], [1, 0.5, 4], [0, 7.0, 1]])
    assert kept.clipped(actions).tolist() == [True, False, False, True]
    assert kept.for_env(actions)["memory_fraction"].ravel().tolist() == [0.0, 0.0, 0.75, 1.0]


@pytest.mark.parametrize(
    "space",
    [
        Box(0.0, np.inf, (2,), np.float32),
        Box(0, 9, (2,), np.int64),
        Box(0.0, 1.0, (2, 2), np.float32),
        gymnasium.spaces.MultiBinary(3),
        Dict({"a": gymnasium.spaces.Text(4)}),
    ],
    ids=str,
)
def test_spaces_that_are_no_columns_are_refused_in_words(space):
    with pytest.raises(ValueError, match="are not kept as columns; take Discrete"):
        actions_of(space)
