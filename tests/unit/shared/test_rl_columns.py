"""Columns: advantages against their definition and RLlib's, minibatches cut as RLlib cuts them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.minibatch_utils import MiniBatchCyclicIterator
from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets
from unit.rl_builders import a_rollout, fragments

from tokenyard.rl.columnar.columns import beyond_others, generalised_advantages, minibatches

rollouts = st.builds(
    lambda seed, steps, copies: a_rollout(np.random.default_rng(seed), steps, copies),
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.integers(1, 4),
)


@given(rollout=rollouts, gamma=st.floats(0.0, 1.0), lambda_=st.floats(0.0, 1.0))
def test_advantages_are_the_sums_of_td_errors_that_define_them(rollout, gamma, lambda_):
    values = rollout.observations[..., 0]
    found = generalised_advantages(rollout, values, gamma, lambda_)
    for copy in range(values.shape[1]):
        for start, stop in fragments(rollout, copy):
            for t in range(start, stop):
                expected = 0.0
                for k in range(t, stop):
                    following = 0.0 if rollout.terminated[k, copy] else values[k + 1, copy]
                    error = rollout.rewards[k, copy] + gamma * following - values[k, copy]
                    expected += (gamma * lambda_) ** (k - t) * error
                assert found[t, copy] == pytest.approx(expected, abs=1e-4)


@given(rollout=rollouts)
def test_advantages_are_those_of_rllib_on_the_same_episodes(rollout):
    values = rollout.observations[..., 0]
    found = generalised_advantages(rollout, values, 0.95, 0.9)
    for copy in range(values.shape[1]):
        for start, stop in fragments(rollout, copy):
            column = slice(start, stop), copy
            # RLlib lengthens each episode by one step that only carries the bootstrap value, and
            # calls the last step of a fragment truncated.
            truncated = rollout.truncated[column].copy()
            truncated[-1] |= not rollout.terminated[stop - 1, copy]
            targets = compute_value_targets(
                values=values[start : stop + 1, copy],
                rewards=np.append(rollout.rewards[column], 0.0),
                terminateds=np.append(
                    rollout.terminated[column], rollout.terminated[stop - 1, copy]
                ),
                truncateds=np.append(truncated, True),
                gamma=0.95,
                lambda_=0.9,
            )
            np.testing.assert_allclose(
                found[column] + values[column], targets[:-1], rtol=1e-4, atol=1e-4
            )


def test_a_rollout_counts_the_steps_that_were_done():
    rollout = a_rollout(np.random.default_rng(3), 20, 4, end_probability=0.4)
    assert len(rollout) == rollout.env_steps() == rollout.real.sum() < 80


@given(
    num_rows=st.integers(1, 40), size=st.none() | st.integers(1, 40), num_epochs=st.integers(1, 4)
)
def test_minibatches_are_cut_as_rllib_cuts_them(num_rows, size, num_epochs):
    rows = torch.arange(num_rows)
    theirs = MiniBatchCyclicIterator(
        MultiAgentBatch({"m": SampleBatch({"rows": rows})}, num_rows),
        num_epochs=num_epochs,
        minibatch_size=size or num_rows,
        shuffle_batch_per_epoch=False,
    )
    expected = [part.policy_batches["m"]["rows"].tolist() for part in theirs]
    assert [rows[cut].tolist() for cut in minibatches(num_rows, size, num_epochs)] == expected


@given(num_rows=st.integers(1, 40), size=st.integers(1, 40), num_epochs=st.integers(1, 4))
def test_shuffled_minibatches_meet_every_row_once_per_epoch(num_rows, size, num_epochs):
    rng = np.random.default_rng(0)
    met = np.concatenate(list(minibatches(num_rows, size, num_epochs, rng)))
    for epoch in range(num_epochs):
        once = met[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(once) == list(range(num_rows))


def test_what_copies_of_the_same_traffic_have_in_common_is_not_their_doing():
    rng = np.random.default_rng(0)
    own, luck = rng.normal(size=(5, 6)), rng.normal(size=(5, 2))
    advantages = (own + luck.repeat(3, axis=1)).astype(np.float32)
    beyond = beyond_others(advantages, 3)
    expected = own.reshape(5, 2, 3) - own.reshape(5, 2, 3).mean(-1, keepdims=True)
    np.testing.assert_allclose(beyond, expected.reshape(5, 6), atol=1e-6)
    np.testing.assert_array_equal(beyond_others(advantages, 1), advantages)
