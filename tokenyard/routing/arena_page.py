"""The arena's board as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from tokenyard.problem import Row
from tokenyard.routing.arena import SIGNIFICANT

_FULL_COLOUR = 0.3
"""Regret from which on a cell of the map has its full colour."""


def write_page(
    path: Path,
    rows: Sequence[Row],
    summed: Sequence[Row],
    failed: Sequence[str],
    details: Sequence[str],
) -> None:
    """Write the page of `arena.rows_of_cell` and `arena.board`; its folder is created.

    `failed` are sentences on entries that failed, `details` say what was run.
    """
    environment = Environment(
        loader=PackageLoader("tokenyard.routing", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"percent": _percent, "colour": _colour}
    cells = list(dict.fromkeys(str(row["cell"]) for row in rows))
    page = environment.get_template("arena.html").render(
        cells=cells,
        results={(row["entry"], row["cell"]): row for row in rows},
        of_cell={cell: [row for row in rows if row["cell"] == cell] for cell in cells},
        summed=summed,
        failed=failed,
        details=details,
        significant=SIGNIFICANT,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f}"


def _colour(regret: float) -> str:
    """Blue below the best rule, orange above; as strong as the regret is large."""
    strength = min(abs(regret) / _FULL_COLOUR, 1.0)
    red, green, blue = (0, 114, 178) if regret < 0 else (213, 94, 0)
    return f"rgba({red},{green},{blue},{0.75 * strength:.2f})"
