"""The paper's demand predictor: a network over the last slots, beside the seasonal forecaster.

Du et al. 2025, arXiv 2507.10259v2, appendix B: 512 and 256 hidden units, ReLU, five past slots,
Adam, squared error and an L2 term of 1e-4. Ours: arrivals alone are the input (use and queues
follow from decisions, which a predictor of demand should not depend on), with the time of the day;
the outputs are counts of several slots ahead through softplus, where the paper has shares of the
next slot (Eq 6 needs counts), fitted by the Poisson likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from tokenyard.regions.demand import RegionStream
from tokenyard.regions.forecast import NUM_TRAINING_DAYS, training_counts
from tokenyard.regions.scenario import RegionScenario
from tokenyard.types import FloatArray

NUM_PAST = 5
_HIDDEN = (512, 256)
_L2 = 1e-4
_STEP = 1e-3
_BATCH = 256


@dataclass(frozen=True, eq=False)
class NetworkForecaster:
    """A trained predictor; `forecast_all` as of `tokenyard.regions.forecast.DemandForecaster`."""

    network: nn.Module
    scale: FloatArray
    """Usual tasks per slot, shape (regions,); inputs and outputs are over it."""
    slots_per_day: int
    num_ahead: int

    def forecast_all(self, stream: RegionStream) -> FloatArray:
        """Forecast every slot of an episode by the slots before it."""
        inputs = _inputs(stream.counts / self.scale, stream.start_slot, self.slots_per_day)
        with torch.no_grad():
            raw = self.network(torch.from_numpy(inputs))
            out = nn.functional.softplus(raw).numpy().astype(np.float64)
        return np.asarray(out.reshape(len(inputs), self.num_ahead, -1) * self.scale)


def _inputs(counts: FloatArray, start_slot: int, slots_per_day: int) -> FloatArray:
    """Past slots and the time of the day, shape (slots, 5 R + 2), float32.

    Before the first slot the usual, which is 1 by the scale, is taken for past.
    """
    padded = np.vstack([np.ones((NUM_PAST, counts.shape[1])), counts])
    past = [padded[k : k + len(counts)] for k in range(NUM_PAST)]
    angle = 2 * np.pi * (start_slot + np.arange(len(counts))) / slots_per_day
    clock = np.column_stack([np.sin(angle), np.cos(angle)])
    return np.hstack([*past, clock]).astype(np.float32)


def fit_network(
    scenario: RegionScenario,
    seed: int = 0,
    num_days: int = NUM_TRAINING_DAYS,
    num_steps: int = 1500,
) -> NetworkForecaster:
    """Train on days that no test stream holds."""
    torch.manual_seed(seed)
    days = training_counts(scenario, seed, num_days)
    scale = np.maximum(days.mean(axis=(0, 1)), 1e-3)
    ahead, num_regions = scenario.forecast_slots, days.shape[2]
    inputs, wanted = [], []
    for day in days:
        last = len(day) - ahead + 1
        index = np.arange(last)[:, None] + np.arange(ahead)
        inputs.append(_inputs(day / scale, 0, scenario.slots_per_day)[:last])
        wanted.append((day / scale)[index].reshape(last, -1))
    x = torch.from_numpy(np.concatenate(inputs))
    y = torch.from_numpy(np.concatenate(wanted).astype(np.float32))
    network = nn.Sequential(
        nn.Linear(x.shape[1], _HIDDEN[0]), nn.ReLU(),
        nn.Linear(_HIDDEN[0], _HIDDEN[1]), nn.ReLU(),
        nn.Linear(_HIDDEN[1], ahead * num_regions),
    )  # fmt: skip
    optimiser = torch.optim.Adam(network.parameters(), lr=_STEP, weight_decay=_L2)
    generator = torch.Generator().manual_seed(seed)
    loss_of = nn.PoissonNLLLoss(log_input=False)
    for _ in range(num_steps):
        rows = torch.randint(len(x), (_BATCH,), generator=generator)
        optimiser.zero_grad()
        loss = loss_of(nn.functional.softplus(network(x[rows])), y[rows])
        loss.backward()
        optimiser.step()
    return NetworkForecaster(network, scale, scenario.slots_per_day, ahead)
