"""What rollouts say a choice costs, against playing each future from the beginning."""

import numpy as np
import pytest

from tokenyard.rl.routing.rollouts import RolloutConfig, RolloutImprovement
from tokenyard.routing.scenario import RewardWeights, load_scenario
from tokenyard.routing.scores.residual import fold, make_scratch, residual_scores
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.rollouts import RESPONSE, SLOW, VIOLATIONS, RolloutSim
from tokenyard.routing.simulator.streams import StreamSource, stream_rng

LENGTH, EVERY, HORIZON, SLOW_AFTER_S = 300, 60, 40, 4.0


def decide(sim, policy, mean_total_tokens):
    request = sim.arrays.requests[0, sim.current()]
    costs = np.empty(sim.scenario.num_servers)
    return residual_scores(
        policy, request[lay.FEATURES :], request[lay.CONTEXT],
        request[lay.PREDICTED_OUTPUT], mean_total_tokens, sim.scenario.slo_response_s,
        sim.arrays.tables[0], make_scratch(policy, len(costs)), costs,
    )  # fmt: skip


def played(scenario, stream, policy, mean_total_tokens):
    """Choices of the policy in the order of decisions, and where each request was in the end."""
    sim = BatchingSim(scenario, 1, LENGTH, RewardWeights(balance=0.0))
    sim.load(0, stream)
    choices = []
    while sim.current() >= 0:
        choices.append(decide(sim, policy, mean_total_tokens))
        sim.step(np.array(choices[-1:]))
    sim.drain()
    return choices, np.maximum(sim.outcomes().server, 0)


def replayed(scenario, stream, choices, place, decision, choice):
    """Play to the decision, take the choice, go on as `place` says, and let everything end.

    Returns:
        Response times, attained SLOs, and which requests were not done at the decision, of
        all requests up to the horizon.
    """
    sim = BatchingSim(scenario, 1, LENGTH, RewardWeights(balance=0.0))
    sim.load(0, stream)
    for action in choices[:decision]:
        sim.step(np.array([action]))
    outcome = sim.arrays.outcomes[0]
    dropped = (outcome[:, lay.SERVER] < 0) & (outcome[:, lay.ATTEMPTS] > 0)
    over = ~np.isnan(outcome[:, lay.FINISH_S]) | dropped
    open_then = ~over & (outcome[:, lay.GAVE_UP] == 0)
    last = sim.current() + 1 + HORIZON
    sim.step(np.array([choice]))
    while 0 <= sim.current() < last:
        sim.step(np.array([place(sim)]))
    sim.drain()
    found = sim.outcomes()
    upto = slice(0, last)
    return found.response_s[upto], found.met[upto], open_then[upto]


@pytest.mark.parametrize(
    "name", ["azure_code_mixed_gpus_085", "multi_turn_prefix", "churn", "two_classes_slo"]
)
@pytest.mark.parametrize("decide_anew", [False, True])
def test_costs_are_those_of_rollouts_played_from_the_beginning(name, decide_anew):
    scenario = load_scenario(name)
    source = StreamSource(scenario)
    mean = source.mean_total_tokens
    fresh = RolloutImprovement(scenario, RolloutConfig()).artifact()
    policy = fold(fresh.arrays, fresh.layers)
    stream = source.sample(LENGTH, stream_rng(0, "training"))
    samples = RolloutSim(scenario, LENGTH, mean).sample(
        policy, stream, EVERY, HORIZON, SLOW_AFTER_S, decide_anew
    )
    assert len(samples) >= 4
    choices, servers = played(scenario, stream, policy, mean)
    np.testing.assert_array_equal(samples.chosen, choices[: len(samples) * EVERY : EVERY])

    def place(sim):
        return decide(sim, policy, mean) if decide_anew else servers[sim.current()]

    lost_s = 10.0 * scenario.slo_response_s
    for k in range(len(samples)):
        for choice in range(scenario.num_servers):
            response_s, met, open_then = replayed(
                scenario, stream, choices, place, k * EVERY, choice
            )
            response_s = np.where(np.isnan(response_s), lost_s, response_s)[open_then]
            costs = samples.costs[k, choice]
            assert costs[RESPONSE] == pytest.approx(response_s.sum(), rel=1e-9)
            assert costs[VIOLATIONS] == pytest.approx((1 - met[open_then]).sum())
            assert costs[SLOW] == (response_s > SLOW_AFTER_S).sum()
