import numpy as np
import pytest

from tokenyard.network import Network, check_network, forward, layers_of

RNG = np.random.default_rng(0)
ARRAYS = {
    "mean": RNG.normal(size=5), "std": RNG.uniform(0.5, 2.0, 5),
    "w0": RNG.normal(size=(4, 5)), "b0": RNG.normal(size=4),
    "w1": RNG.normal(size=(3, 4)), "b1": RNG.normal(size=3),
    "weights": np.zeros(7),
}  # fmt: skip


@pytest.mark.parametrize(
    ("activation", "between"), [("relu", lambda x: np.maximum(x, 0)), ("tanh", np.tanh)]
)
def test_a_network_is_its_formula(activation, between):
    x = RNG.normal(size=5)
    hidden = between(ARRAYS["w0"] @ ((x - ARRAYS["mean"]) / ARRAYS["std"]) + ARRAYS["b0"])
    network = Network.from_arrays(ARRAYS, activation)
    assert network(x) == pytest.approx(ARRAYS["w1"] @ hidden + ARRAYS["b1"])


def test_rows_of_replicas_are_scored_as_each_would_be_alone():
    layers, rows = layers_of(ARRAYS), RNG.normal(size=(2, 6, 5))
    scores = forward(layers, rows)
    assert scores.shape == (2, 6, 3)
    assert scores[1, 4] == pytest.approx(forward(layers, rows[1, 4]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"w1": None}, "4 outputs where there must be 3"),
        ({"b0": None}, "array 'b0' is missing"),
        ({"w1": np.zeros((3, 6))}, r"'w1' has shape \(3, 6\); it must be \(3, 4\)"),
        ({"std": np.zeros(2)}, r"'std' has shape \(2,\); it must be \(5,\)"),
        ({"w0": None, "w1": None}, "at least one layer"),
    ],
)
def test_arrays_that_are_no_network_are_refused(changes, reason):
    arrays = {k: v for k, v in (ARRAYS | changes).items() if v is not None}
    with pytest.raises(ValueError, match=reason):
        check_network(arrays, 5, 3)
    check_network(ARRAYS, outputs=3)
