"""How many tokens an image takes, by the formulas that makers of models publish."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Literal

_USUAL = (1024, 1024)
"""Width and height of an image whose size is not known, such as one behind a URL."""
_HEADS = (64, 256 << 10)
"""Characters of base64 with a size in them: of most images, and of photos with much before it."""
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers of JPEG that a size follows."""
Formula = Callable[[int, int, bool], float]
"""Tokens by width and height, pixels, and whether low detail is asked for."""


def _tiles(base: int, tile: int, width: int, height: int, low: bool) -> float:
    """OpenAI's formula: tiles of 512 pixels, after scaling to 2048 with a short side of 768."""
    if low:
        return base
    fit = min(1.0, 2048 / max(width, height))
    fit *= min(1.0, 768 / (fit * min(width, height)))
    return base + tile * math.ceil(width * fit / 512) * math.ceil(height * fit / 512)


def _merged(side: int, least: int, most: int, width: int, height: int, low: bool) -> float:
    """Qwen's formula: merged patches after scaling to `least` to `most` of them, with a frame."""
    across, down = max(round(width / side), 1), max(round(height / side), 1)
    if not least <= across * down <= most:
        cut, wanted = (math.floor, most) if across * down > most else (math.ceil, least)
        fit = math.sqrt(wanted / (width * height))
        across, down = max(cut(width * fit), 1), max(cut(height * fit), 1)
    return min(across * down, most) + 2


def _pixels(width: int, height: int, low: bool) -> float:
    """Anthropic's formula: 750 pixels each, after scaling to a long side of 1568; at most 1600."""
    fit = min(1.0, 1568 / max(width, height))
    return min(width * height * fit * fit / 750, 1600)


_FORMULAS: tuple[tuple[str, Formula], ...] = (
    (r"gpt-4o-mini", partial(_tiles, 2833, 5667)),
    (r"gpt-4", partial(_tiles, 85, 170)),
    (r"gpt-5", partial(_tiles, 70, 140)),
    (r"\bo[13]\b", partial(_tiles, 75, 150)),
    (r"claude", _pixels),
    (r"qwen-?3", partial(_merged, 32, 64, 16384)),
    (r"", partial(_merged, 28, 4, 16384)),  # Qwen2-VL's, and of those who publish nothing.
)
"""Formulas by names of models; the first that matches counts."""


def formula_of(model: str) -> Formula:
    """Return the function that counts a model's images, by its name."""
    return next(formula for name, formula in _FORMULAS if re.search(name, model, re.IGNORECASE))


def size_of(image: str) -> tuple[int, int]:
    """Width and height, pixels, of a `data:` URL or base64; a usual size of other images."""
    if not image.startswith(("http:", "https:")):
        start = image.find(",", 0, 200) + 1
        for longest in _HEADS:
            head = image[start : start + longest]
            try:
                width, height = _size_in(base64.b64decode(head[: len(head) // 4 * 4]))
            except ValueError:
                break
            if width and height:
                return width, height
    return _USUAL


def _size_in(data: bytes) -> tuple[int, int]:
    """Size in the header of a PNG, GIF, WebP or JPEG; 0: another format, or truncated."""
    kind, at = data[12:16], 2
    if data.startswith(b"\x89PNG"):
        return _pair(data[16:24], "big")
    if data.startswith(b"GIF8"):
        return _pair(data[6:10], "little")
    if kind == b"VP8X":
        width, height = _pair(data[24:30], "little")
        return width + 1, height + 1
    if kind == b"VP8 ":
        width, height = _pair(data[26:30], "little")
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    while data.startswith(b"\xff\xd8") and at + 9 <= len(data):
        if data[at + 1] in _FRAMES:
            height, width = _pair(data[at + 5 : at + 9], "big")
            return width, height
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0, 0


def _pair(data: bytes, order: Literal["big", "little"]) -> tuple[int, int]:
    half = len(data) // 2
    return int.from_bytes(data[:half], order), int.from_bytes(data[half:], order)
