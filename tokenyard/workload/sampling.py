"""The compiled inner loops of the synthetic generator: arrivals and lengths from random numbers."""

from __future__ import annotations

import numpy as np

from tokenyard.compiled import compiled_with_arrays
from tokenyard.types import FloatArray, IntArray


@compiled_with_arrays
def draw_mmpp_arrivals(
    transition_cdf: FloatArray,
    stationary_cdf: FloatArray,
    rates_per_s: FloatArray,
    gap_probabilities: FloatArray,
    gaps: FloatArray,
    dt_s: float,
    arrival_s: FloatArray,
    rng: np.random.Generator,
) -> None:
    """Fill `arrival_s` with the first arrivals of a Markov-modulated process.

    The state is constant within each step of `dt_s` and then moves by one row of the transition
    matrix. Arrivals are placed by time change: the integral of the rate between two arrivals is
    a draw from the gap table.

    Args:
        transition_cdf: Cumulative rows of the transition matrix, shape (states, states).
        stationary_cdf: Cumulative stationary distribution, the first state's, shape (states,).
        rates_per_s: Arrival rate in each state, at least one positive, shape (states,).
        gap_probabilities: Of the gap quantiles, from 0 to 1, shape (g,).
        gaps: Quantiles of the integrated rate between arrivals, mean 1, shape (g,).
        dt_s: Length of a step, seconds.
        arrival_s: Receives the times, seconds, shape (num_requests,).
        rng: Source of every random number used here.
    """
    state = _draw_state(stationary_cdf, rng.random())
    num_steps = 1
    now_s = 0.0
    for i in range(len(arrival_s)):
        work = _interpolate(rng.random(), gap_probabilities, gaps)
        room = (num_steps * dt_s - now_s) * rates_per_s[state]
        # Equal too: a gap of nothing leads out of a state in which nothing arrives.
        while work >= room:
            work -= room
            now_s = num_steps * dt_s
            num_steps += 1
            state = _draw_state(transition_cdf[state], rng.random())
            room = dt_s * rates_per_s[state]
        now_s += work / rates_per_s[state]
        arrival_s[i] = now_s


@compiled_with_arrays
def _draw_state(cdf: FloatArray, uniform: float) -> int:
    state = 0
    while uniform > cdf[state] and state < len(cdf) - 1:
        state += 1
    return state


@compiled_with_arrays
def draw_lengths(
    uniforms: FloatArray,
    context_probabilities: FloatArray,
    context_knots: FloatArray,
    bin_edges: FloatArray,
    generated_probabilities: FloatArray,
    generated_knots: FloatArray,
    context_tokens: IntArray,
    generated_tokens: IntArray,
) -> None:
    """Turn uniform numbers into lengths by inverting the quantile tables of `LengthTables`.

    Args:
        uniforms: In [0, 1), one row for contexts and one for outputs, shape (2, n).
        context_probabilities: Of the context knots, from 0 to 1, shape (p,).
        context_knots: Context quantiles, tokens, shape (p,).
        bin_edges: Upper ends of all context bins but the last, tokens, shape (bins - 1,).
        generated_probabilities: Of the output knots, from 0 to 1, shape (q,).
        generated_knots: Output quantiles of each context bin, tokens, shape (bins, q).
        context_tokens: Receives the contexts, shape (n,).
        generated_tokens: Receives the outputs, shape (n,).
    """
    for i in range(len(context_tokens)):
        context = _interpolate(uniforms[0, i], context_probabilities, context_knots)
        context_tokens[i] = int(context + 0.5)
        row = np.searchsorted(bin_edges, context_tokens[i])
        generated = _interpolate(uniforms[1, i], generated_probabilities, generated_knots[row])
        generated_tokens[i] = int(generated + 0.5)


@compiled_with_arrays
def _interpolate(x: float, knots: FloatArray, values: FloatArray) -> float:
    right = np.searchsorted(knots, x, side="right")
    left = right - 1
    fraction = (x - knots[left]) / (knots[right] - knots[left])
    return float(values[left] + fraction * (values[right] - values[left]))
