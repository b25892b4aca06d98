"""NVIDIA's DynoSim on traces: run by `benchmarks/dynosim.py` in the environment that has it.

.rivals/dynosim/bin/python benchmarks/dynosim_replay.py < job.json > outcomes.json

It imports the standard library and `dynamo` (rivals/dynosim.txt), nothing of this project. A job
has the `engine` that all workers have, and `runs`, each of which names a `trace` file, the number
of `workers` and a `router`. Of each run it prints the CPU seconds of the call and, in the order of
the trace, every request's worker, first token and end in seconds from its arrival, and the prompt
tokens that were cached.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

BLOCK_TOKENS = 16


def outcomes(engine: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Replay one trace, twice: CPU seconds are those of the run that keeps no requests."""
    from dynamo._core import run_mocker_trace_replay

    replay = {
        "extra_engine_args": {"engine": engine}, "num_workers": run["workers"],
        "router_mode": run["router"], "trace_block_size": BLOCK_TOKENS,
    }  # fmt: skip
    cpu_s = float("nan")
    if run["timed"]:
        started_s = time.process_time()
        run_mocker_trace_replay([run["trace"]], capture_planner_details=False, **replay)
        cpu_s = time.process_time() - started_s
    result = run_mocker_trace_replay([run["trace"]], capture_per_request=True, **replay)
    done = sorted(result.per_request, key=lambda one: one["arrival_time_ms"])
    return {
        "cpu_s": cpu_s,
        "arrival_s": [one["arrival_time_ms"] / 1e3 for one in done],
        "worker": [one["decode_worker_idx"] for one in done],
        "first_token_s": [one["ttft_ms"] / 1e3 for one in done],
        "response_s": [one["e2e_latency_ms"] / 1e3 for one in done],
        "hit_tokens": [one["reused_input_tokens"] for one in done],
    }


def main() -> None:
    """Do the job of standard input."""
    os.environ["DYN_LOG"] = "error"
    job = json.load(sys.stdin)
    json.dump([outcomes(job["engine"], run) for run in job["runs"]], sys.stdout)


if __name__ == "__main__":
    main()
