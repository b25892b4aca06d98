"""How a trace is to be read, as commands ask for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.workload.paths import TRACE_FILES, OnBadRow, TimeUnit, find_trace

if TYPE_CHECKING:
    from tokenyard.workload.trace import Trace


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How a trace is read: options of all commands that take one."""

    time_unit: TimeUnit | None = None
    """Unit of the trace's times where they are numbers; None: found out."""
    block_tokens: int | None = None
    """Tokens of the prompt that one of the trace's hash ids stands for; None: its layout's."""
    on_bad_row: OnBadRow = "raise"
    """Whether a malformed row of the trace stops the run, or is left out and counted, up to 1 %."""

    def read(self, trace: Path | str) -> tuple[Trace, int]:
        """Read a file, a folder, or the published trace of that name; tell stderr the layout.

        Returns:
            The trace, and how many bad rows were left out.

        Raises:
            ValueError: There is no such file or folder.
            TraceError: As of `read_trace`.
        """
        # It needs pandas, which serving does without.
        from tokenyard.workload.readers import read_trace

        path = find_trace(str(trace)) if str(trace) in TRACE_FILES else Path(trace)
        if path is None or not path.exists():
            raise ValueError(f"trace {trace} is not there")
        tell = partial(print, file=sys.stderr)
        return read_trace(path, self.on_bad_row, self.time_unit, self.block_tokens, tell)
