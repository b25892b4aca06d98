"""Small engines and requests that get in each other's way: little memory, ties, shared prefixes.

Times and coefficients are multiples of powers of two, so that instants which coincide in principle
coincide in floating point too.
"""

from hypothesis import strategies as st
from oracle.slow_engine import Engine, Job


@st.composite
def engines(draw) -> Engine:
    """Draw a replica with room for a handful of sequences."""
    page_tokens = draw(st.integers(1, 4))
    max_batch = draw(st.integers(1, 5))
    return Engine(
        a=draw(st.sampled_from([0.25, 1.0])),
        b=draw(st.sampled_from([0.0, 0.125])),
        c=draw(st.sampled_from([0.0, 0.25])),
        d=draw(st.sampled_from([0.0, 1 / 64])),
        max_batch=max_batch,
        token_budget=max_batch + draw(st.integers(1, 20)),
        page_tokens=page_tokens,
        num_pages=draw(st.integers(4, 24)),
        block_tokens=page_tokens * draw(st.integers(0, 3)),
        queue_limit=draw(st.sampled_from([1, 3, 100])),
        warm_until_s=draw(st.sampled_from([0.0, 3.0])),
        warm_up_factor=draw(st.sampled_from([1.0, 2.0])),
    )


@st.composite
def chains(draw) -> tuple[int, ...]:
    """Draw a path from the root of a binary tree; a node's number tells its whole path."""
    ids, node = [], 0
    for branch in draw(st.lists(st.integers(0, 1), max_size=5)):
        node = 2 * node + 1 + branch
        ids.append(node)
    return tuple(ids)


@st.composite
def jobs(
    draw, max_size: int = 12, patient: bool = False, ordered: bool = False, late: bool = False
) -> list[Job]:
    """Draw requests in the order of their submission.

    Those that are patient never give up; some of those that are ordered come with keys, and some of
    these with later ones for when they are late.
    """
    late_in_s = st.sampled_from([float("inf"), 0.0, 0.5, 2.0, 6.0] if late else [float("inf")])
    added_s = st.sampled_from([None, -1.0, 0.0, 0.5, 3.0, 20.0] if ordered else [None])
    submit_s, drawn = 0.0, []
    for _ in range(draw(st.integers(1, max_size))):
        submit_s += draw(st.sampled_from([0.0, 0.0, 0.25, 1.0, 5.0]))
        added = draw(added_s)
        waits = draw(st.sampled_from([float("inf"), float("inf"), 0.0, 2.0, 8.0]))
        at_most = draw(st.sampled_from([float("inf"), float("inf"), 0.5, 3.0]))
        job = Job(
            submit_s=submit_s,
            context=draw(st.integers(1, 16)),
            output=draw(st.integers(1, 10)),
            priority=draw(st.integers(0, 1)),
            order_key_s=None if added is None else submit_s + added,
            late_at_s=submit_s + draw(late_in_s),
            late_key_s=submit_s + (added or 0.0) + draw(st.sampled_from([0.25, 1.0, 2.0, 8.0])),
            abandon_s=float("inf") if patient else submit_s + waits,
            max_wait_s=float("inf") if patient else at_most,
            chain=draw(chains()),
        )
        drawn.append(job)
    return drawn
