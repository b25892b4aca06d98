"""The picture of `render_mode="rgb_array"`: bars side by side, without a library for figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.types import FloatArray

Picture = npt.NDArray[np.uint8]

RENDER_METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}
_HEIGHT, _BAR, _GAP = 160, 12, 10
_PAPER, _EMPTY = (255, 255, 255), (232, 234, 237)
_COLOURS = ((31, 119, 180), (44, 160, 44), (214, 69, 65))


def check_render_mode(render_mode: str | None) -> str | None:
    """Return a render mode that there is.

    Raises:
        ValueError: It is another.
    """
    if render_mode not in (None, "rgb_array"):
        raise ValueError(f"unknown render mode {render_mode!r}; choose rgb_array or None")
    return render_mode


def draw_bars(shares: FloatArray) -> Picture:
    """Draw groups of bars, each full at 1.

    Args:
        shares: Shape (num_groups, num_bars), at most three bars; beyond [0, 1] they are cut.

    Returns:
        Pixels, shape (160, 10 + num_groups (12 num_bars + 10), 3).
    """
    num_groups, num_bars = shares.shape
    group = num_bars * _BAR + _GAP
    picture = np.full((_HEIGHT, _GAP + num_groups * group, 3), _PAPER, np.uint8)
    inner = _HEIGHT - 2 * _GAP
    heights = np.rint(np.clip(shares, 0.0, 1.0) * inner).astype(int)
    for (i, k), height in np.ndenumerate(heights):
        left = _GAP + i * group + k * _BAR
        column = picture[_GAP : _HEIGHT - _GAP, left : left + _BAR - 2]
        column[:] = _EMPTY
        column[inner - height :] = _COLOURS[k]
    return picture
