"""The kernel of sessions against its slow form."""

from dataclasses import replace

import numpy as np
import pytest
from oracle.routing.slow_sessions import SlowSessions
from oracle.session_instances import some_replicas, some_sessions

from tokenyard.routing.sessions.rules import RULES, make_rule
from tokenyard.routing.simulator.sessions import run_sessions
from tokenyard.routing.simulator.sessions_kernel import layout as lay

COLUMNS = ("ready", "admitted", "first", "finish", "hit", "prefilled")


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_plays_as_the_slow_form_does(name, seed):
    rng = np.random.default_rng([seed, len(name)])
    replicas = some_replicas(rng, host=seed % 2 == 1)
    stream = some_sessions(rng, replicas, num=16, rate_per_s=4.0, shrinks=seed >= 2)
    rule = make_rule(name)
    # Growth and leases of a size with these small sessions, so that gates are busy.
    changes = {
        "growth_tokens": 50.0 * (rule.growth_tokens > 0),
        "hold_s": float(rng.choice([2, 30])),
    }
    if 0 < rule.lease_s < np.inf:
        changes["lease_s"] = 0.5
    if rule.most_active < np.inf:
        changes["most_active"] = 2.0
    if rule.tick_s:
        changes["tick_s"] = float(rng.choice([0.3, 1.0]))
        changes |= {"half_life_s": 0.5, "pause_s": 2.0} if seed >= 2 else {}
    rule = replace(rule, knows_ends=float(seed % 3 != 0), **changes)
    run = run_sessions(replicas, stream, rule)
    slow = SlowSessions(replicas, stream, rule)
    out = slow.play()
    first = stream.first_turn
    for (session, turn), told in out.items():
        ours = run.outcomes[first[session] + turn]
        np.testing.assert_allclose(ours, [told[name] for name in COLUMNS], rtol=1e-9, atol=1e-7)
    assert len(out) == len(stream.context)
    assert run.totals[lay.PREEMPTIONS] == slow.preemptions
    assert run.totals[lay.HELD_TURNS] == slow.held
