"""Read traces from files: Azure CSV, Mooncake JSON lines, or a plain CSV of your own.

Each format is told apart by its first line. Well-formed CSV goes through pandas in one pass; only
when that finds anything wrong is the file read again line by line, so that an error can name the
line and the reason, or bad rows can be left out and counted.

| format | one row | time |
|---|---|---|
| Azure | TIMESTAMP,ContextTokens,GeneratedTokens | ISO 8601 date and time, taken as UTC |
| Mooncake | {"timestamp", "input_length", "output_length", "hash_ids"} | milliseconds |
| plain | arrival_s,context_tokens,generated_tokens | seconds |

CSV columns may stand in any order and further ones are ignored. The first request always arrives
at second 0 of the trace.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.paths import TRACE_FILES, find_trace
from tokenyard.workload.trace import MOST_TOKENS, Trace

__all__ = ["TRACE_FILES", "TraceError", "find_trace", "read_trace"]

_ENCODING = "utf-8-sig"  # the byte order mark that spreadsheets write is not part of a column name
_YEARS = 1900, 2100
"""Of what is taken for a time."""
_INTEGER = re.compile(r"\s*[+-]?\d+(\.0*)?\s*")


class TraceError(ValueError):
    """A trace file breaks its format; the text names file, line number and reason."""


class _Layout(NamedTuple):
    """Where a format keeps its three columns, and what its times are."""

    time: str
    context: str
    generated: str
    seconds_per_unit: float | None
    """None: times are calendar dates."""


MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of the prompt that one of Mooncake's hash ids stands for (Qin et al. 2025, FAST, 4.1)."""

_AZURE = _Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens", None)
_MOONCAKE = _Layout("timestamp", "input_length", "output_length", 1e-3)
_PLAIN = _Layout("arrival_s", "context_tokens", "generated_tokens", 1.0)


class _Times(NamedTuple):
    """Parsed times: seconds since `origin`, NaN where unparsable, shape (rows,)."""

    seconds: FloatArray
    origin: datetime | None


@dataclass(frozen=True)
class _Row:
    """One row as text; `fault` says why it has no fields."""

    line: int
    time: str = ""
    context: str = ""
    generated: str = ""
    hashes: tuple[int, ...] | None = None
    fault: str | None = None


def read_trace(
    path: Path | str, on_bad_row: Literal["raise", "skip"] = "raise"
) -> tuple[Trace, int]:
    """Read a trace file of any supported format.

    Args:
        path: The file.
        on_bad_row: `raise` stops at the first bad row; `skip` leaves bad rows out. A row that
            is earlier than the last good one is a bad row.

    Returns:
        The trace, and how many rows were left out.

    Raises:
        TraceError: A row is bad and `on_bad_row` is `raise`, a column is missing, or there is
            no usable row at all.
    """
    path = Path(path)
    layout, header = _sniff(path)
    trace = _read_clean_csv(path, layout, header) if header else None
    if trace is not None:
        return trace, 0
    rows = list(_csv_rows(path, layout, header) if header else _json_rows(path, layout))
    return _from_rows(path, rows, layout, on_bad_row)


def _sniff(path: Path) -> tuple[_Layout, list[str] | None]:
    """Return the layout and, for CSV, the column names of line 1."""
    with path.open(encoding=_ENCODING, errors="replace") as file:
        first_line = file.readline().strip()
    if not first_line:
        raise TraceError(f"{path}, line 1: the file is empty; expected a header or a JSON object")
    if first_line.startswith("{"):
        return _MOONCAKE, None
    header = [name.strip() for name in next(csv.reader([first_line]))]
    for layout in (_AZURE, _PLAIN):
        expected = layout[:3]
        if set(expected) & set(header):
            missing = [name for name in expected if name not in header]
            if missing:
                raise TraceError(f"{path}, line 1: missing column {missing[0]}; found {header}")
            return layout, header
    if {"\0", "\ufffd"} & set(first_line):
        raise TraceError(f"{path}, line 1: this is no text in UTF-8; unpack or convert it first")
    known = " or ".join(",".join(layout[:3]) for layout in (_AZURE, _PLAIN))
    raise TraceError(f"{path}, line 1: unknown header {first_line!r}; expected {known}, or JSON")


def _read_clean_csv(path: Path, layout: _Layout, header: list[str]) -> Trace | None:
    """Return the trace, or None as soon as anything is wrong with the file."""
    dates = layout.seconds_per_unit is None
    types = {
        layout.time: "str" if dates else "float64",
        layout.context: "int64",
        layout.generated: "int64",
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                path, header=0, names=header, index_col=False, dtype=types, encoding=_ENCODING
            )
    except (ValueError, OverflowError, pd.errors.ParserWarning):
        return None
    times = _parse_times(frame[layout.time], layout)
    tokens = frame[[layout.context, layout.generated]].to_numpy(np.int64)
    ordered = len(frame) > 0 and bool((np.diff(times.seconds) >= 0).all())
    if not ordered or not np.isfinite(times.seconds).all():
        return None
    if (tokens < 0).any() or (tokens >= MOST_TOKENS).any():
        return None
    return _trace(times, tokens, None)


def _csv_rows(path: Path, layout: _Layout, header: list[str]) -> Iterator[_Row]:
    """Rows as CSV has them: a quoted field may go over several lines, and be of any length."""
    columns = [header.index(name) for name in layout[:3]]
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding=_ENCODING, errors="replace", newline="") as file:
        reader = csv.reader(file, strict=True)
        next(reader)
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # A quote that nobody closes takes all lines after it.
                yield from (_Row(i, fault=str(error)) for i in range(line, reader.line_num + 1))
                continue
            if len(fields) < 2 and not "".join(fields).strip():
                continue
            if len(fields) != len(header):
                yield _Row(line, fault=f"{len(fields)} fields where the header has {len(header)}")
            else:
                time, context, generated = (fields[i].strip() for i in columns)
                yield _Row(line, time, context, generated)


def _json_rows(path: Path, layout: _Layout) -> Iterator[_Row]:
    for line, text in _numbered_lines(path):
        try:
            record = json.loads(text, parse_int=str, parse_float=str)
            hashes = tuple(int(block) for block in record.get("hash_ids") or ())
            time, context, generated = (str(record[name]) for name in layout[:3])
            yield _Row(line, time, context, generated, hashes)
        except KeyError as error:
            yield _Row(line, fault=f"missing column {error.args[0]}")
        except (ValueError, TypeError, AttributeError):
            yield _Row(line, fault=f"not a JSON object with {', '.join(layout[:3])}: {text[:80]!r}")


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding=_ENCODING, errors="replace") as file:
        for line, text in enumerate(file, start=1):
            if text.strip():
                yield line, text.strip()


def _from_rows(
    path: Path, rows: list[_Row], layout: _Layout, on_bad_row: Literal["raise", "skip"]
) -> tuple[Trace, int]:
    """Build the trace from the good rows; see `read_trace` for what happens to the others."""
    if not rows:
        raise TraceError(f"{path}, line 2: the file has a header and no request")
    times = _parse_times(pd.Series([row.time for row in rows], dtype=str), layout)
    faults = _find_faults(rows, times.seconds)
    good = [i for i, fault in enumerate(faults) if fault is None]
    if on_bad_row == "raise" or not good:
        for row, fault in zip(rows, faults, strict=True):
            if fault is not None:
                raise TraceError(f"{path}, line {row.line}: {fault}")
    kept = [rows[i] for i in good]
    tokens = np.array([[int(float(r.context)), int(float(r.generated))] for r in kept], np.int64)
    hashes = _numbered(row.hashes or () for row in kept) if layout is _MOONCAKE else None
    trace = _trace(_Times(times.seconds[good], times.origin), tokens, hashes)
    return trace, len(rows) - len(good)


def _numbered(chains: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Blocks by numbers in order of appearance, as hashes may be of any size."""
    numbers: dict[int, int] = {}
    return tuple(tuple(numbers.setdefault(x, len(numbers)) for x in chain) for chain in chains)


def _find_faults(rows: list[_Row], seconds: FloatArray) -> list[str | None]:
    faults: list[str | None] = []
    latest_s = -np.inf
    for row, time_s in zip(rows, seconds.tolist(), strict=True):
        fault = row.fault or _find_fault(row, time_s, latest_s)
        latest_s = latest_s if fault else time_s
        faults.append(fault)
    return faults


def _find_fault(row: _Row, time_s: float, latest_s: float) -> str | None:
    if not np.isfinite(time_s):
        return f"unparsable time {row.time!r}"
    for what, text in (("context", row.context), ("generated", row.generated)):
        if not _INTEGER.fullmatch(text):
            return f"{what} tokens {text!r} are no integer"
        if float(text) < 0:
            return f"negative {what} tokens {text}"
        if float(text) >= MOST_TOKENS:
            return f"{what} tokens {text} are beyond any prompt"
    if time_s < latest_s:
        return f"time {row.time} is before the row above it; rows must be in order of arrival"
    return None


def _parse_times(texts: pd.Series[str] | pd.Series[float], layout: _Layout) -> _Times:
    """Parse numbers or dates; the origin of dates is the first that can be read."""
    if layout.seconds_per_unit is not None:
        numbers = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64)
        return _Times(numbers * layout.seconds_per_unit, None)
    dates = pd.to_datetime(texts, format="ISO8601", utc=True, errors="coerce")
    # 0001-01-01 and 9999-12-31 stand for no time at all, and differ too much from one.
    dates = dates.where(dates.dt.year.between(*_YEARS))
    readable = dates.dropna()
    if readable.empty:
        return _Times(np.full(len(dates), np.nan), None)
    seconds = (dates - readable.iloc[0]).dt.as_unit("ns") / pd.Timedelta(1, "s")
    return _Times(np.asarray(seconds, np.float64), readable.iloc[0].floor("us").to_pydatetime())


def _trace(times: _Times, tokens: IntArray, hashes: tuple[tuple[int, ...], ...] | None) -> Trace:
    first_s = float(times.seconds[0])
    origin = times.origin and times.origin + pd.Timedelta(first_s, "s").to_pytimedelta()
    return Trace(
        arrival_s=times.seconds - first_s,
        context_tokens=np.ascontiguousarray(tokens[:, 0]),
        generated_tokens=np.ascontiguousarray(tokens[:, 1]),
        started_at=origin,
        prefix_hashes=hashes,
        prefix_block_tokens=None if hashes is None else MOONCAKE_BLOCK_TOKENS,
    )
