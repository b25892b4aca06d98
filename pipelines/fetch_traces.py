"""Download published traces to where the other scripts find them.

    python pipelines/fetch_traces.py
    python pipelines/fetch_traces.py azure_code_1week mooncake_toolagent --folder data

Files that are there are checked and left alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.workload.download import SOURCES, DownloadError, fetch
from tokenyard.workload.paths import TRACE_FILES, data_folders


@dataclass(frozen=True)
class Args:
    """Download published traces; files that are there are checked and left alone."""

    traces: Annotated[tuple[str, ...], tyro.conf.Positional] = ("azure_code", "azure_conv")
    """Names: azure_code, azure_conv (2023, 1 MB), azure_code_1week, azure_conv_1week (2024, 0.7
    and 1.1 GB), mooncake_conversation, mooncake_toolagent, mooncake_synthetic (4 MB)."""
    folder: Path | None = None
    """Where to; by default $TOKENYARD_DATA, else ./data."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def fetch_all(names: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """Fetch each trace under a progress bar on stderr; return one row per file."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    rows = []
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as progress:
        for name in names:
            task = progress.add_task(name, total=None)
            path = folder / TRACE_FILES[name][0]

            def show(done: int, total: int | None, task: Any = task) -> None:
                progress.update(task, completed=done, total=total)

            checked = fetch(SOURCES[name], path, show)
            size = path.stat().st_size
            progress.update(task, completed=size, total=size)
            rows.append({"trace": name, "path": str(path), "bytes": size, "checked": checked})
    return rows


def main(args: Args) -> None:
    unknown = [name for name in args.traces if name not in SOURCES]
    if unknown:
        sys.exit(f"fetch_traces: unknown trace {unknown[0]!r}; choose from {', '.join(SOURCES)}")
    try:
        rows = fetch_all(args.traces, args.folder or data_folders()[0])
    except (DownloadError, OSError) as error:
        sys.exit(f"fetch_traces: {error}")
    for row in rows:
        print("{trace}: {path}, {bytes:,} bytes; checked: {checked}".format(**row))
    write_result(args.json, command_line(), None, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
