"""Small random fleets and streams of sessions, where memory is scarce."""

import numpy as np

from tokenyard.routing.simulator.sessions import SessionReplicas, SessionStream


def some_replicas(rng, host=False):
    num = int(rng.integers(1, 4))
    base = np.array([5e-3, 8e-5, 1e-4, 4e-7])
    return SessionReplicas(
        base * rng.uniform(0.5, 2.0, (num, 4)),
        rng.integers(3000, 7000, num).astype(float),
        rng.integers(2, 6, num).astype(float),
        rng.integers(200, 600, num).astype(float),
        np.full(num, float(rng.integers(1000, 20_000)) if host else 0.0),
        np.full(num, 5e-6),
    )


def some_sessions(rng, replicas, num=12, rate_per_s=2.0, shrinks=False):
    longest = 0.9 * replicas.kv_tokens.min()
    first, context, answer, kept = [], [], [], []
    for _ in range(num):
        first.append(len(context))
        said = 0.0
        for _ in range(int(rng.integers(1, 6))):
            if shrinks and rng.random() < 0.5:
                said = float(rng.integers(0, said + 1))
            prompt = said + float(rng.integers(20, 900))
            tokens = float(rng.integers(1, 200))
            if prompt + tokens > longest:
                break
            context.append(prompt)
            answer.append(tokens)
            kept.append(said)
            said = prompt + tokens
    num_turns = len(context)
    return SessionStream(
        np.cumsum(rng.exponential(1 / rate_per_s, num)), np.array(first), np.array(context),
        np.array(answer), rng.exponential(0.7, num_turns), rng.exponential(3.0, num_turns),
        np.array(kept),
    )  # fmt: skip
