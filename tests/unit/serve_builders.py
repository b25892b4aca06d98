"""What the tests of serving are made from: bodies, policies, and an ASGI caller."""

import asyncio
import json
from functools import partial

import numpy as np

from serve_app.cluster import CircuitBreakerSettings, load_cluster
from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.gateway.gateway import Gateway
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy.card import PolicyCard
from serve_app.policy.loading import LoadedPolicy, from_artifact, from_baseline
from serve_app.policy.manager import PolicyManager
from serve_app.policy.runner import warm_up
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.metadata import ArtifactMetadata, FeatureScaling, LengthPredictor
from tokenyard.routing.observation import (
    NUM_MARGINAL_WEIGHTS,
    NUM_REQUEST_FEATURES,
    observation_size,
)
from tokenyard.routing.scenario import load_scenario

PREDICTOR = LengthPredictor(bin_edges_tokens=(1000.0,), mean_generated_tokens=(10.0, 50.0))


def a_snapshot(replica_id="a", **fields):
    return {
        "replica_id": replica_id,
        "tokens_per_s": 5000.0,
        "num_slots": 1,
        "max_concurrency": 5,
        "num_waiting": 0,
        "num_running": 0,
        "tokens_in_flight": 0.0,
        **fields,
    }


def three_snapshots():
    """Slow, middling and fast; the middling one has the least to do."""
    return [
        a_snapshot("slow", tokens_per_s=3000.0, num_running=1, tokens_in_flight=6000.0),
        a_snapshot("middling", num_running=1, tokens_in_flight=1000.0),
        a_snapshot(
            "fast", tokens_per_s=7000.0, num_waiting=1, num_running=1, tokens_in_flight=9000.0
        ),
    ]


def a_body(snapshots=None, **request):
    request = {"context_tokens": 2000, **request}
    return {"request": request, "snapshots": snapshots or three_snapshots()}


def metadata(**fields):
    known = {
        "kind": "marginal",
        "scenario": "poisson_085",
        "trainer": "policy_search",
        "num_replicas": None,
        "slo_response_s": 2.0,
        "mean_total_tokens": 2000.0,
        "output_length": "by_context",
        "predictor": PREDICTOR,
    }
    return ArtifactMetadata(**{**known, **fields})


def linear_artifact(weights=None, **fields):
    """Shortest expected delay, unless weights say otherwise."""
    weights = np.zeros(NUM_MARGINAL_WEIGHTS) if weights is None else np.asarray(weights, float)
    return PolicyArtifact(metadata(**{"num_replicas": 3, **fields}), {"weights": weights})


def network_artifact(seed=0, **fields):
    """An untrained network over three replicas."""
    rng = np.random.default_rng(seed)
    size = observation_size(3, whole=False)
    scaling = FeatureScaling(
        medians=(0.0,) * NUM_REQUEST_FEATURES, scales=(1.0,) * NUM_REQUEST_FEATURES
    )
    arrays = {
        "mean": np.zeros(size),
        "std": np.ones(size),
        "w0": rng.normal(size=(16, size)),
        "b0": rng.normal(size=16),
        "w1": rng.normal(size=(3, 16)),
        "b1": rng.normal(size=3),
    }
    known = {"kind": "mlp", "trainer": "ppo", "num_replicas": 3, "expected_finish": False}
    fields = {**known, "scaling": scaling, **fields}
    return PolicyArtifact(metadata(**fields), arrays)


def a_baseline(name="sed"):
    return from_baseline(name, load_scenario("poisson_085"))


def a_trained_policy(artifact=None):
    loaded = from_artifact(
        "test", artifact or linear_artifact(), "a test", load_scenario("poisson_085")
    )
    warm_up(loaded)  # As when it is served: to compile takes longer than a decision may.
    return loaded


class Faulty:
    """A policy that does what it is told, however wrong."""

    def __init__(self, act):
        self._act = act

    def route(self, request, snapshots):
        return self._act()


def a_faulty_policy(act):
    """A served policy that calls `act` for its choice."""
    card = PolicyCard(
        name="faulty",
        kind="marginal",
        trainer="a test",
        scenario="poisson_085",
        sha256="0",
        source="a test",
        num_replicas=None,
        output_length="none",
        slo_response_s=2.0,
    )
    return LoadedPolicy(card, partial(_make_faulty, act), None)


def _make_faulty(act, rng):
    return Faulty(act)


def a_manager(loaded=None, explore_fraction=0.0, seed=0):
    """A manager of `poisson_085` whose baseline is SED; its policy is given a second."""
    settings = CircuitBreakerSettings(budget_s=1.0)
    manager = PolicyManager("poisson_085", "sed", settings, np.random.default_rng(seed))
    manager.switch("test", explore_fraction, prepared=loaded or a_trained_policy())
    return manager


def a_deciding_api(loaded=None, log=None, **options):
    """The HTTP API of a gateway without pools, which only decides."""
    gateway = Gateway(load_cluster("none"), a_manager(loaded), {}, log=log, **options)
    return create_gateway_api(gateway, EstimatingTokenizer(), Access(None))


def call(api, method, path, body=b"", headers=()):
    """Send one request through the ASGI app; return the status and the decoded JSON body."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    return asyncio.run(_call(api, method, path, body, headers))


async def _call(api, method, path, body, headers):
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": list(headers) or [(b"content-type", b"application/json")],
        "root_path": "",
        "server": ("test", 80),
        "client": ("test", 1),
    }
    sent = []
    halves = [body[: len(body) // 2], body[len(body) // 2 :]]

    async def receive():
        more = len(halves) > 1
        return {"type": "http.request", "body": halves.pop(0), "more_body": more}

    async def send(message):
        sent.append(message)

    await api(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(text)


def an_engine(**fields):
    """What a snapshot tells of a replica that batches continuously, on the wire."""
    return {
        "iteration_s": 0.01,
        "prefill_token_s": 6e-5,
        "sequence_s": 5e-5,
        "kv_token_s": 8e-8,
        "token_budget": 512,
        "kv_capacity_tokens": 400_000.0,
        "kv_used_fraction": 0.1,
        "prefill_in_flight_tokens": 0.0,
        "output_in_flight_tokens": 500.0,
        "match_tokens": 0,
        **fields,
    }


def marginal_artifact(weights=None, **fields):
    """Least marginal delay, unless weights say otherwise."""
    weights = np.zeros(NUM_MARGINAL_WEIGHTS) if weights is None else np.asarray(weights, float)
    return PolicyArtifact(metadata(kind="marginal", **fields), {"weights": weights})
