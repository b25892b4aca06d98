"""Multi-turn traffic: what turns share, and what they add up to."""

import numpy as np
import pytest

from tokenyard.workload.closed import draw_closed
from tokenyard.workload.model import load_model
from tokenyard.workload.sessions import Sessions, session_means

BLOCK = 64
SESSIONS = Sessions(mean_turns=4, num_system_prompts=3, system_prompt_tokens=256)


@pytest.fixture(scope="module")
def trace():
    return SESSIONS.generate(4000, np.random.default_rng(1), 5.0, load_model("azure_conv"), BLOCK)


def test_the_rate_and_the_lengths_are_what_was_asked_for(trace):
    assert trace.num_requests == 4000
    assert trace.mean_rate_per_s == pytest.approx(5.0, rel=0.1)
    context, output = session_means(SESSIONS, "azure_conv")[:2]
    assert trace.context_tokens.mean() == pytest.approx(context, rel=0.1)
    assert trace.generated_tokens.mean() == pytest.approx(output, rel=0.1)
    assert trace.context_tokens.max() <= SESSIONS.max_context_tokens


def test_equal_blocks_have_equal_blocks_before_them(trace):
    before = {}
    for chain in trace.prefix_hashes:
        for k, block in enumerate(chain):
            assert before.setdefault(block, chain[:k]) == chain[:k]


def test_a_chain_covers_the_prompt_and_its_answer(trace):
    tokens = trace.context_tokens + trace.generated_tokens
    lengths = [len(chain) for chain in trace.prefix_hashes]
    np.testing.assert_array_equal(lengths, tokens // BLOCK)


def test_all_requests_begin_with_one_of_the_system_prompts_the_first_most_often(trace):
    first, counts = np.unique([chain[:4] for chain in trace.prefix_hashes], axis=0, return_counts=1)
    assert len(first) == 3
    assert np.sort(counts)[::-1] / counts.sum() == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.1)


def test_a_later_turn_repeats_all_that_was_said_before(trace):
    """Of two requests that share a block beyond the system prompt one continues the other."""
    latest, continued = {}, 0
    for chain, context in zip(trace.prefix_hashes, trace.context_tokens, strict=True):
        if len(chain) <= 4:
            continue
        session = chain[4]
        if session in latest:
            earlier, earlier_context = latest[session]
            assert chain[: len(earlier)] == earlier
            assert context > earlier_context
            continued += 1
        latest[session] = (chain, context)
    assert continued > 1500


def test_equal_seeds_give_equal_traces():
    model = load_model("azure_conv")
    one, two = (SESSIONS.generate(200, np.random.default_rng(3), 1.0, model, 16) for _ in range(2))
    assert one.prefix_hashes == two.prefix_hashes
    assert one.arrival_s.tobytes() == two.arrival_s.tobytes()


def test_sessions_of_which_none_can_begin_are_refused():
    """Drawing more and more of them in search of one would take all memory."""
    sessions = Sessions(system_prompt_tokens=8192)
    with pytest.raises(ValueError, match="begins with a prompt of at most max_context_tokens 8192"):
        sessions.generate(10, np.random.default_rng(0), 1.0, load_model("azure_conv"), 128)
    with pytest.raises(ValueError, match=r"none of .* sessions begins"):
        session_means(sessions, "azure_conv")
    rng, model = np.random.default_rng(0), load_model("azure_conv")
    with pytest.raises(ValueError, match=r"none of .* sessions begins"):
        draw_closed(sessions, 10, 2, rng, model, 128)


def test_a_message_has_at_least_a_token_in_the_mean():
    assert Sessions(mean_message_tokens=1.0)
    with pytest.raises(ValueError, match="mean_message_tokens"):
        Sessions(mean_message_tokens=0.5)
