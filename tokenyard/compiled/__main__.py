"""Compile every kernel into the cache, so that nobody waits for it later.

python -m tokenyard.compiled

Simulators compile side by side, as many as there are processors: about three minutes on two.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from tokenyard.compiled import warm_up


def main() -> None:
    """Compile everything."""
    tasks = (
        warm_up.compile_batching,
        warm_up.compile_regions,
        warm_up.compile_sessions,
        warm_up.compile_constant_rate,
        warm_up.compile_allocation,
    )
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for running in [pool.submit(task) for task in tasks]:
            running.result()


if __name__ == "__main__":
    main()
