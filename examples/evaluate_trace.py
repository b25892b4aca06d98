"""Which routing rule is best for your traffic: replay a trace on a model of a fleet.

    python examples/evaluate_trace.py my.csv
    python examples/evaluate_trace.py           # draws a trace, and replays that

A trace has the columns arrival_s (seconds), context_tokens and generated_tokens. It is scaled to
85 % of what the fleet can do, and cut into windows that do not overlap.
Expect a table with one line per rule, and the differences to `least_connections` with intervals
over the windows. It takes about 10 seconds. The fleet is the scenario's: four kinds of GPU.
For a fleet of your own use `tokenyard compare --fleet FILE --trace FILE`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from pipelines import evaluate

SCENARIO = "azure_code_slo"
RULES = "round_robin,least_connections,sed,marginal_delay,marginal_delay+wspt@100:1"
WINDOWS = 5
REQUESTS = 5000
"""Of the trace that is drawn."""


def draw_trace(path: Path) -> None:
    """Write a trace with Poisson arrivals and lognormal lengths."""
    rng = np.random.default_rng(0)
    rows = np.column_stack(
        [
            np.cumsum(rng.exponential(0.2, REQUESTS)),
            rng.lognormal(7.0, 1.0, REQUESTS).astype(int) + 1,
            rng.lognormal(4.0, 0.8, REQUESTS).astype(int) + 1,
        ]
    )
    header = "arrival_s,context_tokens,generated_tokens"
    np.savetxt(path, rows, fmt=("%.3f", "%d", "%d"), delimiter=",", header=header, comments="")


def main() -> None:
    """Replay the trace that is named, or one that is drawn, under each rule."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(sys.argv[1]) if sys.argv[1:] else Path(folder) / "drawn.csv"
        if not sys.argv[1:]:
            draw_trace(trace)
        evaluate.main(
            evaluate.Args(
                scenario=SCENARIO, trace=trace, policies=RULES, baseline="least_connections",
                streams=WINDOWS,
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
