"""Steps along the natural gradient: what they are made from, and what they do not depend on."""

import copy

import pytest
import torch

from tokenyard.rl.columnar.natural_gradient import NaturalGradient, fisher_matrix


def a_policy(num=400, num_actions=3, num_weights=4, seed=0):
    """Features of actions, and weights of a softmax over them."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(num, num_actions, num_weights, generator=draw, dtype=torch.float64)
    return features, torch.linspace(-0.5, 0.5, num_weights, dtype=torch.float64)


def moved(features, weights, costs, **settings):
    """Weights after one step that lowers the expected cost."""
    weights = weights.clone().requires_grad_()
    probabilities = torch.softmax(features @ weights, -1)
    (probabilities * costs).sum(-1).mean().backward()
    optimizer = NaturalGradient([weights], **settings)
    optimizer.see(fisher_matrix(probabilities.detach(), features))
    optimizer.step()
    return weights.detach()


def test_the_fisher_matrix_is_the_second_derivative_of_the_divergence():
    features, weights = a_policy()
    before = torch.softmax(features @ weights, -1)

    def divergence(to):
        return (before * (before.log() - torch.log_softmax(features @ to, -1))).sum(-1).mean()

    expected = torch.autograd.functional.hessian(divergence, weights)
    assert torch.allclose(fisher_matrix(before, features), expected, atol=1e-10)


def test_a_step_does_not_depend_on_the_units_of_features():
    features, weights = a_policy()
    costs = torch.randn(features.shape[:2], generator=torch.Generator().manual_seed(1)).double()
    units = torch.tensor([1.0, 0.1, 7.0, 30.0], dtype=torch.float64)
    one = moved(features, weights, costs)
    other = moved(features * units, weights / units, costs)
    assert torch.allclose(other * units, one, atol=1e-4)


def test_a_full_step_fits_the_advantages_to_logits():
    features, weights = a_policy()
    fitted = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
    after = moved(features, weights, -(features @ fitted), lr=1.0, damping=0.0)
    assert after - weights == pytest.approx(fitted, abs=1e-4)


def test_a_weight_that_changes_no_decision_stays():
    features, weights = a_policy()
    features[..., 2] = 5.0
    costs = features[..., 0]
    after = moved(features, weights, costs)
    assert after[2] == pytest.approx(float(weights[2]), abs=1e-6)
    assert after[0] < weights[0]


def test_what_it_has_seen_is_saved():
    weights = torch.ones(2, requires_grad=True)
    one = NaturalGradient([weights], lr=0.5)
    one.see(torch.diag(torch.tensor([4.0, 1.0])))
    other = NaturalGradient([weights], lr=0.5)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer in (one, other):
        optimizer.see(torch.eye(2))
    seen = [optimizer.state[weights]["fisher"] for optimizer in (one, other)]
    assert torch.equal(*seen)
    assert seen[0].diagonal() == pytest.approx(torch.tensor([3.7, 1.0]))
