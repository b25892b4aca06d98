"""The arena's board as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from tokenyard.problem import Row
from tokenyard.routing.arena import SIGNIFICANT, board

_FULL_COLOUR = 0.3
"""Regret from which on a cell of the map has its full colour."""
_COLUMNS = (
    ("mean_response_s", "mean, s", 1), ("p99_response_s", "p99, s", 1),
    ("mean_ttft_s", "first token, s", 1), ("slo_violation_fraction", "SLO violations, %", 100),
    ("goodput_per_s", "goodput, 1/s", 1), ("dropped_fraction", "dropped, %", 100),
)  # fmt: skip
"""Measures of a row, their headings, and what they are multiplied by."""
_SESSION_COLUMNS = (
    ("mean_completion_s", "mean completion, s", 1), ("p99_completion_s", "p99, s", 1),
    ("sessions_in_slo_fraction", "in SLO, %", 100), ("mean_ttft_s", "first token, s", 1),
    ("p99_ttft_s", "its p99, s", 1), ("held_turns_fraction", "held turns, %", 100),
)  # fmt: skip


def write_page(
    path: Path,
    rows: Sequence[Row],
    sessions: Sequence[Row],
    failed: Sequence[str],
    details: Sequence[str],
) -> None:
    """Write the page of rows of routing and of sessions; its folder is created.

    `failed` are sentences on entries that failed, `details` say what was run.
    """
    environment = Environment(
        loader=PackageLoader("tokenyard.routing", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"percent": _percent, "colour": _colour}
    boards = [
        {
            "heading": heading,
            "mean": mean,
            "columns": columns,
            "summed": board(board_rows),
            "results": {(row["entry"], row["cell"]): row for row in board_rows},
            "of_cell": {
                cell: [row for row in board_rows if row["cell"] == cell]
                for cell in dict.fromkeys(str(row["cell"]) for row in board_rows)
            },
        }
        for heading, mean, columns, board_rows in (
            ("Requests", "response", _COLUMNS, rows),
            ("Sessions", "completion", _SESSION_COLUMNS, sessions),
        )
    ]
    page = environment.get_template("arena.html").render(
        boards=boards,
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
