"""Who samples: RLlib's env runner with seeds far apart, and the one that keeps arrays."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.columns import Columns
from ray.rllib.env.env_runner import ENV_STEP_FAILURE
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics import RLMODULE_INFERENCE_TIMER

from tokenyard.rl.columnar.actions import DiscreteActions, actions_of
from tokenyard.rl.columnar.columns import Rollout

CLIPPED_FRACTION = "actions_clipped_fraction"
"""Metric of the env runner, told as the reward is: share of a round's actions with a number beyond
the bounds of its space, in place of which the environment got the bound; only of actions that have
numbers."""
REWARD_PER_REQUEST = "reward_per_request"
"""Metric of the env runner: mean reward of the steps of a sampling round; told is the mean over the
rounds since the last report."""


_RLLIB_ENV_ID = "rllib-single-agent-env-v0"
"""Name under which RLlib registers whatever environment a runner steps."""


class RouterEnvRunner(SingleAgentEnvRunner):
    """Steps many copies of the environment at once.

    RLlib seeds runner i with seed + i, and a vectorised environment seeds copy j with that
    plus j: two runners, or two trials with seeds 1 and 2, would sample nearly the same traffic.
    Here every runner of every seed starts at a place of its own, and at another one each time that
    it begins anew: a restored trial meets other traffic than when it began.
    """

    _num_resets = 0

    def make_env(self) -> None:
        """Make the environment, after settling the seed of its first reset."""
        # More threads than cores make small networks many times slower.
        torch.set_num_threads(1)
        if self.config.seed is not None:
            sequence = np.random.SeedSequence([self.config.seed, self.worker_index])
            self._seed = int(sequence.generate_state(1)[0] >> 1)
        # A process that builds a second algorithm would be warned about the first one's entry.
        gymnasium.registry.pop(_RLLIB_ENV_ID, None)
        super().make_env()

    def _try_env_reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        done = (int(self.num_env_steps_sampled_lifetime), self._num_resets)
        if seed is not None and any(done):
            seed = int(np.random.SeedSequence([seed, *done]).generate_state(1)[0] >> 1)
        self._num_resets += 1
        return super()._try_env_reset(seed=seed, options=options)

    def sample(self, **kwargs: Any) -> list[Any]:
        """Sample, and log the mean reward: an episode of traffic outlasts many iterations."""
        sampled: list[Any] = super().sample(**kwargs)
        self._log_mean(REWARD_PER_REQUEST, np.concatenate([_rewards(batch) for batch in sampled]))
        return sampled

    def _log_mean(self, key: str, values: np.ndarray) -> None:
        # By default RLlib keeps 0.99 of what it knew at every value, over all reports.
        self.metrics.log_value(key, float(values.mean()), reduce="mean")


NOISE_STEPS = 64
"""Steps for which the noise of exploration is drawn at once."""


class ColumnarEnvRunner(RouterEnvRunner):
    """Steps all copies at once and returns one `Rollout` of arrays for the episodes.

    RLlib's env runner makes an episode object per copy and sends every observation and action
    through connector pipelines: nine tenths of its time. Here the module reads the environment's
    own arrays and the environment the module's. Connectors are bypassed: what they would do to
    observations and masks belongs into the module (minus infinity as logit), and what they would do
    to actions, bringing them into the bounds of the space, is `tokenyard.rl.columnar.actions`.

    Training samples come this way. Whole episodes, which evaluation asks for, come as RLlib's
    objects through its own code, and so does whatever is sampled without exploration.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Build environment, module and the pipelines of RLlib's own code.

        Raises:
            ValueError: Callbacks that need episode objects, or actions that are no columns.
        """
        super().__init__(**kwargs)
        _refuse_episode_callbacks(self.config)
        assert self.module is not None
        self._actions = actions_of(self.module.action_space)
        # What is drawn here is independent of torch's global generator, which others use too.
        self._noise = torch.Generator().manual_seed(self._seed or 0)
        self._observations: np.ndarray | None = None
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        self._started_s = np.zeros(self.num_envs)

    def _sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[Any]:
        if num_timesteps is None or not explore or random_actions:
            # What is in the environments now is not what the next rollout would go on with.
            self._observations = None
            self._needs_initial_reset = True
            episodes: list[Any] = super()._sample(
                num_timesteps=num_timesteps,
                num_episodes=num_episodes,
                explore=explore,
                random_actions=random_actions,
                force_reset=force_reset,
            )
            return episodes
        if force_reset:
            self._observations = None
        rollout = None
        while rollout is None:
            rollout = self._roll_out(num_timesteps)
        self._log_env_steps(metric=self._metrics_num_env_steps_sampled, num_steps=len(rollout))
        ended = np.count_nonzero(rollout.terminated | rollout.truncated)
        self._increase_sampled_metrics(len(rollout), int(ended))
        return [rollout]

    def _reset_copies(self) -> np.ndarray:
        """Start every copy afresh, each time with other traffic."""
        observations, _ = self._try_env_reset(seed=self._seed)
        self._ended[:] = False
        self._returns[:] = 0.0
        self._lengths[:] = 0
        self._started_s[:] = time.perf_counter()
        return np.asarray(observations)

    @torch.inference_mode()
    def _roll_out(self, num_timesteps: int) -> Rollout | None:
        """Step all copies until so many steps are done; None where the environment was remade."""
        if self._observations is None:
            self._observations = self._reset_copies()
        module = self.module
        assert module is not None
        module.eval()
        observations, inputs = [self._observations], []
        steps: list[tuple[np.ndarray, ...]] = []
        num_done, inference_s = 0, 0.0
        noise = torch.empty(0)
        # Of all runners together, which is what schedules of exploration go by.
        runners = self.config.num_env_runners or 1
        while num_done < num_timesteps:
            started_s = time.perf_counter()
            batch = {Columns.OBS: torch.from_numpy(observations[-1]).to(self._device)}
            at = self.num_env_steps_sampled_lifetime + num_done * runners
            output = module._forward_exploration(batch, t=at)
            if Columns.ACTIONS in output:
                chosen = output[Columns.ACTIONS]
            else:
                drawn_from = output[Columns.ACTION_DIST_INPUTS]
                if len(steps) % NOISE_STEPS == 0:
                    shape = (NOISE_STEPS, *drawn_from.shape[:-1])
                    noise = self._actions.noise(shape, self._noise).to(self._device)
                chosen = self._actions.draw(drawn_from, noise[len(steps) % NOISE_STEPS])
                inputs.append(drawn_from)
            actions = chosen.cpu().numpy()
            inference_s += time.perf_counter() - started_s
            result = self._try_env_step(self._actions.for_env(actions))
            if result == ENV_STEP_FAILURE:
                self._observations = None
                return None
            seen, rewards, terminated, truncated, _ = result
            # A copy: environments may write the next observation into the same array.
            observations.append(np.array(seen))
            real = ~self._ended
            steps.append((actions, rewards.astype(np.float32), terminated, truncated, real))
            self._ended = terminated | truncated
            self._count(rewards, real)
            num_done += int(np.count_nonzero(real))
        self._observations = observations[-1]
        self.metrics.log_value(RLMODULE_INFERENCE_TIMER, inference_s / len(steps))
        all_actions, all_rewards, terminations, truncations, all_real = (
            np.stack(column) for column in zip(*steps, strict=True)
        )
        if not isinstance(self._actions, DiscreteActions):
            self._log_mean(CLIPPED_FRACTION, self._actions.clipped(all_actions[all_real]))
        return Rollout(
            observations=np.stack(observations),
            actions=all_actions,
            rewards=all_rewards,
            terminated=terminations,
            truncated=truncations,
            real=all_real,
            action_inputs=torch.stack(inputs).cpu().numpy() if inputs else None,
            weights_seq_no=self._weights_seq_no,
        )

    def _count(self, rewards: np.ndarray, real: np.ndarray) -> None:
        """Keep account of episodes, and log those that ended."""
        self._returns += rewards
        self._lengths += real
        if not self._ended.any():
            return
        now_s = time.perf_counter()
        for copy in np.flatnonzero(self._ended).tolist():
            self._log_episode_metrics(
                int(self._lengths[copy]),
                float(self._returns[copy]),
                now_s - self._started_s[copy],
            )
        self._returns[self._ended] = 0.0
        self._lengths[self._ended] = 0
        self._started_s[self._ended] = now_s


def _rewards(sampled: Any) -> np.ndarray:
    """Rewards of a rollout or an episode, shape (num_steps,)."""
    if isinstance(sampled, Rollout):
        return sampled.rewards[sampled.real]
    return np.asarray(sampled.get_rewards())


def _refuse_episode_callbacks(config: Any) -> None:
    for name in ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end"):
        by_class = any(
            getattr(callback_class, name, None) is not getattr(RLlibCallback, name, None)
            for callback_class in force_list(config.callbacks_class)
        )
        if by_class or getattr(config, f"callbacks_{name}", None):
            raise ValueError(
                f"callback {name} needs episode objects, which are not made on the columnar path; "
                "leave it out, or choose the implementation 'rllib_stock'"
            )
