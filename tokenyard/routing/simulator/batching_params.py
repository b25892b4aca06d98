"""A fleet and what is paid in it, as the numbers that the kernel of batching replicas reads."""

from __future__ import annotations

import numpy as np

from tokenyard.routing import observation
from tokenyard.routing.fleet import Fleet
from tokenyard.routing.scenario import RewardWeights
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.rewards import NUM_REWARDS, reward_rules
from tokenyard.types import FloatArray


def replica_params(fleet: Fleet, capacities: tuple[float, ...]) -> FloatArray:
    """What each replica is, by its speed in tokens per second, shape (num_replicas, NUM_PARAMS)."""
    params = np.zeros((len(fleet.replicas), lay.NUM_PARAMS))
    for row, config, tokens_per_s in zip(params, fleet.replicas, capacities, strict=True):
        row[lay.ITERATION_S : lay.KV_TOKEN_S + 1] = config.iteration
        row[lay.MAX_BATCH] = config.max_batch
        row[lay.TOKEN_BUDGET] = config.token_budget
        row[lay.NUM_PAGES] = config.kv_capacity_tokens // fleet.page_tokens
        row[lay.WARM_UP_FACTOR] = 1.0
        if fleet.churn is not None:
            row[lay.WARM_UP_S] = fleet.churn.warm_up_s
            row[lay.WARM_UP_FACTOR] = fleet.churn.warm_up_factor
        # Of one place in the batch, as of one slot of a server: the full speed is all of them.
        row[lay.TOKENS_PER_S] = tokens_per_s / config.max_batch
        row[lay.IDLE_W] = config.idle_w
        row[lay.ITERATION_J : lay.KV_TOKEN_J + 1] = config.energy
        row[lay.SCRAPE_INTERVAL_S] = fleet.scrape_interval_s
    params[:, lay.RANK] = ranks(params)
    return params


def ranks(params: FloatArray) -> FloatArray:
    """Rank of every replica by its full speed, shape (num_replicas,)."""
    full = params[:, lay.TOKENS_PER_S] * params[:, lay.MAX_BATCH]
    return observation.speed_ranks(full)


def fleet_rules(fleet: Fleet, reward: RewardWeights, stream_length: int) -> FloatArray:
    """What holds for all replicas, and what is paid, shape (lay.NUM_RULES,)."""
    most = max(config.max_batch for config in fleet.replicas)
    rules = np.zeros(lay.NUM_RULES)
    rules[:NUM_REWARDS] = reward_rules(reward)
    rules[lay.PAGE_TOKENS] = fleet.page_tokens
    rules[lay.BLOCK_TOKENS] = fleet.prefix_block_tokens
    rules[lay.QUEUE_LIMIT] = fleet.queue_limit
    rules[lay.PREFILL_AT] = lay.NUM_SCALARS + fleet.page_tokens
    rules[lay.DECODE_AT] = rules[lay.PREFILL_AT] + lay.PREFILL_FIELDS * most
    rules[lay.RING_AT] = rules[lay.DECODE_AT] + lay.DECODE_FIELDS * most
    # Preempted sequences join those that wait.
    rules[lay.RING_SIZE] = min(fleet.queue_limit + most, stream_length)
    rules[lay.RETRY_DELAY_S] = fleet.retry_delay_s
    rules[lay.MAX_RETRIES] = fleet.max_retries
    rules[lay.ENERGY] = reward.energy
    rules[lay.LOOKS_AHEAD] = reward.credits_response or reward.energy != 0.0
    return rules
