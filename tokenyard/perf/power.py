"""Power and energy of a replica."""

from __future__ import annotations

import numpy as np

from tokenyard.perf.iteration import Numbers, iteration_s
from tokenyard.perf.replica import Replica
from tokenyard.types import FloatArray

BUSY_FLOOR = 0.30
BUSY_SLOPE = 1.7
BUSY_EXPONENT = 0.6


def power_w(
    replica: Replica, flop_utilisation: Numbers, busy_fraction: Numbers = 1.0
) -> FloatArray:
    """Power of all GPUs of a replica, watts; both shares lie in [0, 1].

    GPUs x (idle + busy (TDP - idle) min(1, .30 + 1.7 u^.6)); the curve was fitted to four
    published H100 points (300, 600, 480, 520 W, met within 15 %) and is assumed for the others.
    `u` is operations per second over the nominal rate while busy.
    """
    gpu = replica.gpu
    utilisation = np.asarray(flop_utilisation, float)
    level = np.minimum(1.0, BUSY_FLOOR + BUSY_SLOPE * utilisation**BUSY_EXPONENT)
    busy_w = np.asarray(busy_fraction, float) * (gpu.tdp_w - gpu.idle_w) * level
    return np.asarray(replica.num_gpus * (gpu.idle_w + busy_w))


def flop_utilisation(
    replica: Replica, prefill_tokens: Numbers, decoding_sequences: Numbers, kv_tokens: Numbers
) -> FloatArray:
    """Operations per second over the nominal rate during an iteration, in [0, 1].

    Two operations per weight and token; those of attention are left out. 0 for an empty batch.
    """
    tokens = np.asarray(prefill_tokens, float) + np.asarray(decoding_sequences, float)
    time_s = iteration_s(replica, prefill_tokens, decoding_sequences, kv_tokens)
    operations = 2 * replica.llm.num_layers * replica.llm.layer_parameters * tokens
    most = replica.num_gpus * replica.flops_per_s * time_s
    return np.asarray(operations / np.where(time_s > 0, most, 1.0))
