"""Small regional scenarios and streams for tests."""

from tokenyard.regions.demand import sample_stream, stream_rng
from tokenyard.regions.forecast import NoisyOracle
from tokenyard.regions.scenario import RegionScenario


def a_scenario(**changes):
    """Four regions with 24 servers, an hour of slots."""
    fields = {
        "name": "tiny",
        "description": "for tests",
        "topology": "synthetic/gabriel/4/1",
        "server_counts": {"H100": 4, "A100": 6, "V100": 8, "T4": 6},
        "num_slots": 60,
    }
    return RegionScenario.model_validate(fields | changes)


def a_stream(scenario, seed=0):
    return sample_stream(scenario, stream_rng(seed, "training", 0))


def an_oracle(scenario):
    return NoisyOracle(0.0, scenario.forecast_slots)
