"""By which rule a policy orders, in a form that can be compared."""

import numpy as np
import pytest
from unit.serve_builders import marginal_artifact

from tokenyard.routing.artifact import PolicyArtifact, learned_policy
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.policies.order_spec import UNKNOWN, in_words, order_spec
from tokenyard.routing.policies.rule_name import Term
from tokenyard.routing.simulator.server_models import order_weights_of
from tokenyard.routing.types import Decision
from tokenyard.types import Slo


def spec(name):
    context = PolicyContext("none_such", Slo(10.0), np.random.default_rng(0), 3)
    return order_spec(make_policy(name, context))


def trained(order):
    plain = marginal_artifact()
    arrays = plain.arrays | ({} if order is None else {"order": np.asarray(order)})
    return order_spec(learned_policy(PolicyArtifact(plain.metadata, arrays)))


@pytest.mark.parametrize(
    "order",
    ["sjf@20", "wspt@5:2", "boost@4", "boost@4:0.5", "late_last@2", "edf@2", "slack@1:1", "fair@3"],
)
def test_one_order_has_one_spec_behind_any_placement_and_is_written_as_it_is_asked_for(order):
    assert spec(f"sed+{order}") == spec(f"marginal_delay+{order}") == spec(f"sed+{order}")
    assert in_words(spec(f"sed+{order}")) == order
    if not order.startswith("fair"):
        assert spec(f"marginal_in_order@1:1+{order}") == spec(f"sed+{order}")


def test_orders_that_differ_in_kind_knob_or_set_back_have_different_specs():
    names = [
        "sed", "sed+sjf@20", "sed+sjf@21", "sed+sjf@20:1", "sed+wspt@20", "sed+late_last@1",
        "sed+boost@20", "sed+edf@20", "sed+slack@20", "sed+fair@20",
    ]  # fmt: skip
    assert len({spec(name) for name in names}) == len(names)


def test_a_trained_order_is_that_of_the_rule_with_its_weights():
    for order in ("sjf@20", "wspt@5:2", "boost@4:0.5", "late_last@2"):
        assert trained(order_weights_of(Term.parse(order))) == spec(f"sed+{order}")
    assert trained(None) is trained(np.zeros(4)) is spec("sed") is None
    mixed = trained([1.0, 0.0, 4.0, 2.0])
    assert in_words(mixed) == "sjf@1 and boost@4, set back by 2 waits"


def test_an_order_that_says_nothing_of_itself_is_unknown():
    class Mine:
        sees_queues = False

        def route(self, request, snapshots):
            return 0

        def place(self, request, snapshots):
            return Decision(0, None)

    assert order_spec(Mine()) is UNKNOWN
    assert in_words(UNKNOWN) == "an order of its own"
    assert in_words(None) == "first come, first served"
