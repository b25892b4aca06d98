"""How good decisions are, when an exact programme says what the best one would have been.

The allocation paper reports accuracy, precision, recall, F1 and ROC without saying of what. Here
the label of a state is its best action by exact dynamic programming, the prediction is the policy's
action, and every slot of the data counts once. Accuracy says nothing where actions tie, so regret
stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenyard.types import FloatArray, IntArray

_TIE = 1e-9


@dataclass(frozen=True, eq=False)
class DecisionQuality:
    """One policy against the optimum; S states, A actions."""

    accuracy: float
    """Share of slots in which the action is the label."""
    state_accuracy: float
    """The same over states, each counted once."""
    tie_accuracy: float
    """Share of slots in which no action is better than the one taken."""
    precision: float
    """Mean over the labels that occur; a label that is never predicted counts 0."""
    recall: float
    f1: float
    regret: float
    """Mean value lost per slot by taking the policy's action once and the best ones after."""
    confusion: IntArray
    """Slots by label and action taken, shape (A, A)."""


def decision_quality(
    policy: IntArray, optimal_values: FloatArray, states: IntArray
) -> DecisionQuality:
    """Compare a policy with exact action values.

    Args:
        policy: Action of every state, shape (S,).
        optimal_values: Optimal action values, shape (S, A).
        states: State of every slot, shape (T,).
    """
    labels = optimal_values.argmax(axis=1)
    num_actions = optimal_values.shape[1]
    visits = np.bincount(states, minlength=len(policy))
    confusion = np.zeros((num_actions, num_actions), np.int64)
    np.add.at(confusion, (labels, policy), visits)
    hits = np.diag(confusion).astype(float)
    occurring = confusion.sum(axis=1) > 0
    predicted, actual = confusion.sum(axis=0), confusion.sum(axis=1)
    precision = np.divide(hits, predicted, out=np.zeros(num_actions), where=predicted > 0)
    recall = np.divide(hits, actual, out=np.zeros(num_actions), where=actual > 0)
    both = precision + recall
    f1 = np.divide(2 * precision * recall, both, out=np.zeros(num_actions), where=both > 0)
    lost = optimal_values.max(axis=1) - optimal_values[np.arange(len(policy)), policy]
    weights = visits / visits.sum()
    visited = visits > 0
    return DecisionQuality(
        accuracy=float(weights @ (policy == labels)),
        state_accuracy=float((policy == labels)[visited].mean()),
        tie_accuracy=float(weights @ (lost <= _TIE)),
        precision=float(precision[occurring].mean()),
        recall=float(recall[occurring].mean()),
        f1=float(f1[occurring].mean()),
        regret=float(weights @ lost),
        confusion=confusion,
    )


def one_vs_rest_roc(
    scores: FloatArray, labels: IntArray, states: IntArray
) -> tuple[FloatArray, FloatArray, float]:
    """Micro-averaged one-vs-rest ROC: does an action's score tell the label from the others?

    Every pair of slot and action is one case, positive where the action is the slot's label.

    Args:
        scores: A policy's action scores, shape (S, A).
        labels: Best action of every state, shape (S,).
        states: State of every slot, shape (T,).

    Returns:
        False and true positive rates, rising, and the area under them.
    """
    visits = np.bincount(states, minlength=len(labels)).astype(float)
    positive = np.zeros(scores.shape)
    positive[np.arange(len(labels)), labels] = 1.0
    weight = np.repeat(visits[:, None], scores.shape[1], axis=1)
    # Scores are compared within a state: only their order there means anything.
    centred = scores - scores.mean(axis=1, keepdims=True)
    order = np.argsort(-centred.ravel(), kind="stable")
    sorted_scores = centred.ravel()[order]
    hits = np.cumsum((positive * weight).ravel()[order])
    alarms = np.cumsum(((1 - positive) * weight).ravel()[order])
    ends = np.append(np.flatnonzero(np.diff(sorted_scores) != 0), len(order) - 1)
    tpr = np.concatenate([[0.0], hits[ends] / hits[-1]])
    fpr = np.concatenate([[0.0], alarms[ends] / alarms[-1]])
    return fpr, tpr, float(np.trapezoid(tpr, fpr))
