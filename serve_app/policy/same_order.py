"""Whether two policies may stand in one queue: requests of both wait by the keys that they give."""

from __future__ import annotations

from serve_app.policy.runner import PolicyRunner
from tokenyard.routing.policies.order_spec import UNKNOWN, in_words


class OrdersDiffer(ValueError):
    """A canary that would wait by keys of its own; the text says what to do instead."""


def order_difference(champion: PolicyRunner, other: PolicyRunner) -> str | None:
    """How the orders of two policies differ, in words; None: they give equal keys.

    Equal knobs are not enough: an order goes by lengths that each policy predicts by itself.
    """
    ours, theirs = champion.order, other.order
    if ours != theirs or UNKNOWN in (ours, theirs):
        return (
            f"requests of {champion.label} wait by {in_words(ours)}, and those of {other.label} "
            f"by {in_words(theirs)}"
        )
    if ours is not None and champion.loaded.predictor != other.loaded.predictor:
        return (
            f"requests of {champion.label} and {other.label} wait by {ours}, and the two predict "
            "other lengths of the answers that it goes by"
        )
    return None


def check_canary(champion: PolicyRunner, canary: PolicyRunner) -> None:
    """Refuse a canary whose requests would wait by other keys than the champion's.

    Raises:
        OrdersDiffer: They would.
    """
    found, order = order_difference(champion, canary), champion.order
    if found is None and order is not None and order.counts_requests:
        found = f"{order} counts the requests that it orders, and each policy would count its own"
    if found is not None:
        raise OrdersDiffer(
            f"no canary: {found}. Both would wait in the same queues, where whoever has the "
            "earlier key goes first, so the test would tell the keys apart and not the policies. "
            "Compare them in the simulator (pipelines/evaluate.py), try the policy as a shadow, "
            "which shows that it works, and promote it from there; a rollback takes it back at once"
        )
