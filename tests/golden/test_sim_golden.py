"""What the simulator does with one fixed stream, recorded.

A difference here with the oracle still content means that the rules were changed on purpose: run
`python tests/golden/test_sim_golden.py` to record them again, and say why in the commit.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.scenario import Scenario, Server
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.simulator.constant_rate import ClusterSim

FILE = Path(__file__).with_name("sim_summary.json")
DISCIPLINES = ("serial", "parallel_full", "parallel_split", "processor_sharing")
NUM_REQUESTS = 2000


def a_fixed_simulation(discipline: str) -> dict[str, float]:
    """Send a stream without any randomness but the golden ratio's through the three servers."""
    servers = [("slow", 3000, 3), ("middle", 5000, 5), ("fast", 7000, 7)]
    scenario = Scenario(
        name="golden",
        description="fixed",
        servers=tuple(
            Server(name=name, tokens_per_s=speed, concurrency=slots)
            for name, speed, slots in servers
        ),
        discipline=discipline,
        arrivals={"load": 0.9},
    )
    uniform = np.arange(1, NUM_REQUESTS + 1) * 0.618033988749895 % 1.0
    tokens = np.round(200 + 6000 * uniform**3)
    stream = np.zeros((NUM_REQUESTS, kernel.NUM_REQUEST))
    gap_s = tokens.mean() / (0.9 * scenario.capacity_tokens_per_s)
    stream[:, kernel.ARRIVAL_S] = np.cumsum(gap_s * 2 * (uniform * 7 % 1.0))
    stream[:, kernel.DISPATCH_S] = stream[:, kernel.ARRIVAL_S]
    stream[:, kernel.TRUE_TOTAL] = tokens
    stream[:, kernel.PREDICTED_TOTAL] = 1.1 * tokens
    sim = ClusterSim(scenario, 1, NUM_REQUESTS)
    sim.load(0, stream)
    rng = np.random.default_rng(7)
    rewards = 0.0
    for action in rng.choice(3, p=[0.2, 0.33, 0.47], size=(NUM_REQUESTS, 1)):
        rewards += float(sim.step(action)[0])
    observation = sim.observe()[0].astype(float)
    sim.drain()
    outcomes = sim.view().outcomes()
    sim.run_linear(np.zeros(NUM_MARGINAL_WEIGHTS), float(tokens.mean()))
    return {
        "reward": rewards,
        "mean_response_s": float(outcomes.response_s.mean()),
        "p99_response_s": float(np.quantile(outcomes.response_s, 0.99)),
        "mean_waiting": float(outcomes.waiting_seen.mean()),
        "observation_sum": float(observation.sum()),
        "sed_mean_response_s": float(sim.view().outcomes().response_s.mean()),
    }


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_the_simulator_repeats_its_recorded_summary(discipline):
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    assert a_fixed_simulation(discipline) == pytest.approx(recorded[discipline], rel=1e-6)


if __name__ == "__main__":
    summary = {discipline: a_fixed_simulation(discipline) for discipline in DISCIPLINES}
    FILE.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
