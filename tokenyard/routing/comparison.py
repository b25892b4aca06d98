"""Today's rule beside the best on one's own traffic: what it comes to, in sentences and a page.

Nothing is claimed that an interval does not say, and no gain at all where the simulator is further
than `MOST_ERROR` off the response times that were measured.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.problem import Row
from tokenyard.statistics.intervals import Interval

MOST_ERROR = 0.15
"""Error of the simulated mean response, as a fraction, beyond which no gain is claimed."""
ROLES = {
    "now": "today", "default": "default", "best_rule": "best rule", "searched": "searched policy",
}  # fmt: skip
"""Role of a row, in words."""
HEADINGS = ("policy", "mean, s", "p99, s", "TTFT, s", "in SLO, %", "carries, requests/s")
"""Of `cells`; the last is the load that the SLOs allow."""
_CLAIMS = ("delta_", "sustainable_")


@dataclass(frozen=True)
class Conclusion:
    """What a comparison comes to."""

    headline: str
    sentences: list[str]
    is_refused: bool = False
    """Whether the simulator is too far off for any claim."""


def judged(rows: Sequence[Row], served: str, goal: float, error: float) -> Conclusion:
    """Say what a policy gains over the first, and how far the simulator can be believed.

    Args:
        rows: Of `LoadSweep.rows` at the load that is asked about.
        served: Name of the policy that is recommended.
        goal: Share of requests that are to attain their SLOs.
        error: Of the simulated mean response, as a fraction; NaN: nothing was measured.
    """
    now, *others = rows
    of_today = f"{'today' if now['role'] == 'now' else 'the default'}'s {now['policy']}"
    about = (
        f"{now['requests']:,} requests were played on a simulator of the fleet, at "
        f"{float(now['rate_per_s']):.3g} a second: {float(now['offered_load']):.0%} of what it can "
        "do."
    )
    if error > MOST_ERROR:
        why = (
            f"Its mean response is {error:.0%} off the measured one, more than {MOST_ERROR:.0%}. "
            "Check GPUs, models and batch limits in the fleet file, or let pipelines/calibrate.py "
            "--url write one."
        )
        return Conclusion("The simulator is not your fleet: no gain is claimed", [about, why], True)
    twin = f"The simulator's mean response is {error:.0%} off the measured one."
    if math.isnan(error):
        twin = (
            "Nothing says how far the simulator is from your fleet: a decision log would, or a "
            "column response_s of measured times with --now."
        )
    if not others:
        headline = f"Nothing to gain here: {now['policy']} is the best rule already"
        return Conclusion(headline, [about, twin])
    row = next((row for row in others if row["policy"] == served), others[-1])
    name = "the searched policy" if row["role"] == "searched" else str(row["policy"])
    ours, theirs = (float(compared["sustainable_load_per_s"]) for compared in (row, now))
    mean, tail, load = (_change(row, what) for what in ("mean", "p99", "sustainable"))
    sentences = [
        about,
        f"Mean response with {name} beside {of_today}: {_said(mean)}.",
        f"p99: {_said(tail)}." if not math.isnan(tail.estimate) else
        "The p99 has not settled: the slowest hundredth comes from one or two bursts.",
        f"With {goal:.0%} of the requests in their SLOs, the same GPUs carry {ours:.3g} requests a "
        f"second in place of {theirs:.3g}: {_said(load)}.",
        twin,
    ]  # fmt: skip
    # Violations; where the queue of today's policy only grows, nothing else has an interval.
    fewer_late = float(row["delta_slo_ci_high"]) < 0.0
    if mean.low > 0.0 or not (mean.high < 0.0 or load.low > 0.0 or fewer_late):
        few = math.isnan(mean.low) or math.isnan(load.low)
        nothing = f"Nothing to gain here: stay with {of_today}"
        unknown = "These requests are too few to tell the policies apart"
        return Conclusion(unknown if few else nothing, sentences)
    if mean.high < 0.0:
        headline = f"{name} answers {-mean.estimate:.1%} sooner on average than {of_today}"
    elif fewer_late:
        share, before = (float(compared["slo_attainment_fraction"]) for compared in (row, now))
        headline = (
            f"{name} keeps {share:.1%} of the requests in their SLOs, {of_today} {before:.1%}"
        )
    else:
        headline = f"{name} carries {load.estimate:.1%} more requests in SLO than {of_today}"
    return Conclusion(headline, sentences)


def _change(row: Row, what: str) -> Interval:
    return Interval(*(float(row[f"delta_{what}_{of}"]) for of in ("fraction", "ci_low", "ci_high")))


def _said(change: Interval) -> str:
    """A change in words, with its interval or why there is none."""
    if math.isnan(change.low):
        return f"{change.estimate:+.1%}, which these requests are too few to tell from chance"
    level = ", which is level" if change.low <= 0.0 <= change.high else ""
    return f"{change.estimate:+.1%} [{change.low:+.1%}, {change.high:+.1%}]{level}"


def without_claims(row: Row) -> Row:
    """A row without differences and without the load that SLOs allow."""
    return {key: math.nan if key.startswith(_CLAIMS) else value for key, value in row.items()}


def cells(row: dict[str, Any]) -> list[tuple[str, str]]:
    """A row as it is printed, below `HEADINGS`: what was measured, and its change to the first."""
    # Violations as a row has them are attainment with the other sign.
    points = Interval(
        *(-100.0 * row[f"delta_slo_{of}"] for of in ("violation", "ci_high", "ci_low"))
    )
    changes = {
        "mean_response_s": _cell(_change(row, "mean").over(0.01), "%"),
        "p99_response_s": _cell(_change(row, "p99").over(0.01), "%"),
        "mean_ttft_s": "",
        "slo_attainment_fraction": _cell(points, ""),
        "sustainable_load_per_s": _cell(_change(row, "sustainable").over(0.01), "%"),
    }
    scale = {"slo_attainment_fraction": 100.0}
    is_first = row["policy"] == row["baseline"]
    return [(row["policy"], ROLES[row["role"]])] + [
        (_number(scale.get(key, 1.0) * row[key]), "" if is_first else change)
        for key, change in changes.items()
    ]


def _cell(change: Interval, unit: str) -> str:
    if math.isnan(change.estimate):
        return ""
    interval = "" if math.isnan(change.low) else f" [{change.low:+.1f}, {change.high:+.1f}]"
    return f"{change.estimate:+.1f}{unit}{interval}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def write_page(
    path: Path, rows: Sequence[Row], load: float, verdict: Conclusion, goal: float,
    provenance: Sequence[str],
) -> None:  # fmt: skip
    """Write one HTML file that needs nothing else; its folder is created.

    Args:
        path: Of the file.
        rows: Of `LoadSweep.rows`.
        load: That is asked about.
        verdict: Of `judged`.
        goal: Share of requests that are to attain their SLOs.
        provenance: How it was made, in sentences; the last is the command.
    """
    # Only who asks for a page needs matplotlib and jinja2.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from tokenyard.routing.figures import draw_loads

    drawing = io.StringIO()
    labels = {str(row["policy"]): f"{ROLES[str(row['role'])]}: {row['policy']}" for row in rows}
    draw_loads(rows, labels, load, goal).savefig(drawing, format="svg", metadata={"Date": None})
    environment = Environment(
        loader=PackageLoader("tokenyard.routing", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    page = environment.get_template("compare.html").render(
        verdict=verdict, goal=goal, told=provenance, headings=HEADINGS,
        tables=[(title, [cells(row) for row in group]) for title, group in tables(rows, load)],
        figure=Markup(drawing.getvalue()[drawing.getvalue().index("<svg") :]),
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def tables(rows: Sequence[Row], load: float) -> list[tuple[str, list[Row]]]:
    """Title and rows of the tables: at a load, and at half of it."""
    titled = []
    for title, at in (("At this load", load), ("At half of it", 0.5 * load)):
        group = [row for row in rows if math.isclose(float(row["offered_load"]), at)]
        rate = float(group[0]["rate_per_s"])
        titled.append((f"{title}: {rate:.3g} requests a second, offered load {at:.2f}", group))
    return titled
