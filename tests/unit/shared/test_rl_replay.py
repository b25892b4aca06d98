"""Columnar replay: what is kept, what is drawn, and what a checkpoint of it holds."""

import numpy as np
import pytest
from ray.rllib.core.columns import Columns
from unit.rl_builders import a_rollout

from tokenyard.rl.columnar.replay_buffer import ColumnarEpisodeReplayBuffer


def told_apart(rollout, first):
    """The same rollout with a number of its own as the reward of every step."""
    rollout.rewards[rollout.real] = np.arange(first, first + len(rollout))
    return rollout


def kept(buffer):
    return sorted(buffer.get_state()["columns"][Columns.REWARDS].tolist())


def test_the_newest_steps_are_kept_up_to_the_capacity_and_no_step_twice():
    buffer, rng, added = ColumnarEpisodeReplayBuffer(50), np.random.default_rng(0), 0
    for _ in range(10):
        rollout = told_apart(a_rollout(rng, 3, 4), added)
        added += len(rollout)
        buffer.add([rollout])
        assert len(buffer) == min(added, 50)
        assert kept(buffer) == list(range(max(added - 50, 0), added))
    assert added > 50


def test_a_rollout_larger_than_the_buffer_leaves_its_last_steps():
    buffer = ColumnarEpisodeReplayBuffer(10)
    rollout = told_apart(a_rollout(np.random.default_rng(0), 8, 4), 0)
    buffer.add(rollout)
    assert kept(buffer) == list(range(len(rollout) - 10, len(rollout)))


def test_a_step_is_followed_by_what_was_seen_after_it_also_where_its_episode_ends():
    buffer = ColumnarEpisodeReplayBuffer(100, seed=1)
    rollout = told_apart(a_rollout(np.random.default_rng(4), 6, 3, end_probability=0.5), 0)
    assert not rollout.real.all()
    buffer.add([rollout])
    (drawn,) = buffer.sample(500)
    assert len(drawn) == drawn.env_steps() == 500
    steps, copies = np.nonzero(rollout.real)
    at = drawn.columns[Columns.REWARDS].astype(int)
    step, copy = steps[at], copies[at]
    for name, expected in {
        Columns.OBS: rollout.observations[step, copy],
        Columns.NEXT_OBS: rollout.observations[step + 1, copy],
        Columns.ACTIONS: rollout.actions[step, copy],
        Columns.TERMINATEDS: rollout.terminated[step, copy],
        Columns.TRUNCATEDS: rollout.truncated[step, copy],
    }.items():
        np.testing.assert_array_equal(drawn.columns[name], expected)
    # Uniform: 500 draws over some 14 steps leave none out.
    assert set(at) == set(range(len(rollout)))


def test_a_restored_buffer_goes_on_as_the_saved_one():
    rng = np.random.default_rng(2)
    buffer = ColumnarEpisodeReplayBuffer(30, seed=3)
    for _ in range(4):
        buffer.add([a_rollout(rng, 3, 4)])
    restored = ColumnarEpisodeReplayBuffer(30, seed=9)
    restored.set_state(buffer.get_state())
    for one in (buffer, restored):
        one.add([a_rollout(np.random.default_rng(5), 3, 4)])
    drawn, again = (one.sample(20)[0].columns for one in (buffer, restored))
    for name in drawn:
        np.testing.assert_array_equal(drawn[name], again[name])


def test_metrics_come_under_rllibs_keys():
    buffer = ColumnarEpisodeReplayBuffer(20)
    buffer.add([a_rollout(np.random.default_rng(0), 8, 4)])
    buffer.sample(7)
    metrics = buffer.get_metrics()
    assert metrics["num_env_steps_stored"].peek() == 20
    assert metrics["num_env_steps_sampled"].peek() == 7


def test_what_it_cannot_draw_is_refused_in_words():
    buffer = ColumnarEpisodeReplayBuffer(10)
    with pytest.raises(ValueError, match="nothing in the buffer"):
        buffer.sample(3)
    with pytest.raises(ValueError, match="n_step=3"):
        buffer.sample(3, n_step=3)
