"""Read traces from files: published layouts, a table of your own, or what engines log.

A layout is told by its column names (`_LAYOUTS`; docs/workloads.md describes them), and columns may
stand in any order and have others beside them. An engine's log is told by its lines (`_LOGS`). A
folder is read as one trace: an engine or collector starts a new file now and then.

Well-formed CSV goes through pandas in one pass; only when that finds anything wrong is the file
read again line by line, so that an error can name the line and the reason, or bad rows can be left
out and counted.

Times are dates, numbers since 1970, or numbers since any moment. The size of numbers since 1970
tells their unit. The unit of others is that of the layout, as long as requests then come at a
believable rate; else `TraceOptions.time_unit` is asked for. The first request always arrives at
second 0 of the trace.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, TextIO, cast

import numpy as np
import pandas as pd

from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.engine_logs import TraceRow, sglang_rows, span_rows
from tokenyard.workload.paths import TRACE_FILES, OnBadRow, TimeUnit, find_trace
from tokenyard.workload.trace import MOST_TOKENS, Trace

__all__ = ["TRACE_FILES", "TraceError", "find_trace", "read_trace"]

_PER_SECOND: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_ENCODING = "utf-8-sig"  # the byte order mark that spreadsheets write is not part of a column name
_YEARS = 1900, 2100
"""Of what is taken for a date."""
_EPOCH_S = 1e9, 4.1e9
"""Of what is taken for seconds since 1970: from 2001 to 2099. A trace whose numbers begin at 0 is
not within such a range, whatever its unit is."""
_RATES_PER_S = 0.01, 200.0
"""Requests per second that are believed without being told the unit of the times."""
RESPONSE = "response_s"
"""Optional column of any layout: measured response times, seconds."""
_FEW = 10
"""Rows that are too few to tell what is odd about one of them."""
_MOST_BAD = 0.01
"""Share of the rows that may be left out."""
_LULL_S = 1800.0, 86_400.0
"""Seconds that a row may be away from the others whatever these span: one that stands before an
earlier or after a later one, and one in order."""
_QUOTED = 80
"""Characters of a file that a message repeats at most."""
_HEAD = 1 << 16
"""Characters in which a layout is looked for: a JSON file may be one line."""
_INTEGER = re.compile(r"\s*[+-]?\d+(\.0*)?\s*")
_KEY = re.compile(r'"([^"\\]{1,40})"\s*:')


class TraceError(ValueError):
    """A trace file breaks its format; the text names file, line number and reason."""


class _Layout(NamedTuple):
    """Where a format keeps its three columns, and what its numbers mean."""

    name: str
    time: str
    context: str
    generated: str
    units: tuple[TimeUnit, ...] = ()
    """What times may be in that are numbers and do not count from 1970: the first one, or, where
    they have fractions, any; none: there is no telling."""
    mark: str | None = None
    """A further column that only this layout has."""
    block_tokens: int | None = None
    """Tokens of the prompt that one of its hash ids stands for."""
    rows: Callable[[Iterable[str]], Iterator[TraceRow]] | None = None
    """Reads the lines of an engine's log; None: they are of a table."""


_LENGTHS = "timestamp", "input_length", "output_length"
_LAYOUTS = (
    _Layout("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    _Layout("BurstGPT", "Timestamp", "Request tokens", "Response tokens", ("s",)),
    _Layout("plain", "arrival_s", "context_tokens", "generated_tokens", ("s",)),
    _Layout("Bailian", *_LENGTHS, ("s",), "chat_id", 16),
    # Milliseconds are whole; converters have also written seconds under the same names.
    _Layout("Mooncake", *_LENGTHS, ("ms", "s"), "hash_ids", 512),
    _Layout("Mooncake without hash ids", *_LENGTHS),
)
_LOGS = (
    (re.compile(r'"event": "request\.(received|finished)|(Receive|Finish|Receive OpenAI): obj='),
     _Layout("SGLang", "time", "context", "generated", rows=sglang_rows)),
    (re.compile('"resourceSpans"'),
     _Layout("OpenTelemetry", "time", "context", "generated", rows=span_rows)),
)  # fmt: skip
"""Logs of engines, by what is in the lines of one."""
_NO_TRACES = (
    (re.compile(r"Received request \S+ (prompt|params): |INFO \d\d-\d\d \d\d:\d\d:\d\d \["),
     "vLLM's log has no numbers of tokens, and times in whole seconds; start vLLM with "
     "--otlp-traces-endpoint, and give the spans that a collector has written to a file"),
    (re.compile(r'"ttfts"\s*:'), "the result of a benchmark (vllm bench serve) is no trace"),
    (re.compile(r'"messages"\s*:'), "a set of conversations is no trace"),
)  # fmt: skip
"""Files that engineers have beside traces, by what is in them, and what to say of each."""
_Parsed = tuple[Trace, int, str]
"""A trace, how many bad rows were left out, and what was recognised."""


class _Times(NamedTuple):
    """Parsed times: seconds since `origin`, NaN where unparsable, shape (rows,)."""

    seconds: FloatArray
    origin: datetime | None
    unit: str
    """In words."""


def read_trace(
    path: Path | str,
    on_bad_row: OnBadRow = "raise",
    time_unit: TimeUnit | None = None,
    block_tokens: int | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[Trace, int]:
    """Read a trace of any known layout, with or without gzip: a file, or all files of a folder.

    Rows out of order are sorted. Failed requests, which BurstGPT's traces have, are left out.
    Units of times and blocks are detected where they are None. `tell` gets one line about the
    layout that was recognised.

    Returns:
        The trace, and how many bad rows were left out.

    Raises:
        TraceError: A row is bad and `on_bad_row` is `raise`, or more than 1 % of the rows are; a
            column is missing; there is no row; or the unit of times cannot be detected.
    """
    path = Path(path)
    if block_tokens is not None and block_tokens < 1:
        raise TraceError(f"blocks of {block_tokens} tokens are none; give at least 1")
    try:
        files = [path]
        if path.is_dir():
            files = [file for file in path.iterdir() if file.is_file() and file.stat().st_size]
            files.sort()
        if not files:
            raise TraceError(f"{path}: the folder has no file with anything in it")
        layout, header = _sniff(files[0])
        layout = layout._replace(block_tokens=block_tokens or layout.block_tokens)
        parsed = None
        if header and len(files) == 1:
            parsed = _read_clean_csv(files[0], layout, header, time_unit)
        if parsed is None:
            rows = [row for file in files for row in _rows(file, layout)]
            parsed = _from_rows(path, rows, layout, time_unit, on_bad_row)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: what was packed by gzip is broken: {error}") from None
    trace, bad, described = parsed
    if block_tokens is None:
        _check_blocks(path, trace)
    tell(f"trace {path}: {described}")
    return trace, bad


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _open(path: Path) -> TextIO:
    opened = gzip.open if _is_packed(path) else open
    return cast(TextIO, opened(path, "rt", encoding=_ENCODING, errors="replace", newline=""))


def _quote(text: str) -> str:
    """What a message repeats of a file."""
    return f"{text[:_QUOTED]!r}{' ...' * (len(text) > _QUOTED)}"


def _sniff(path: Path) -> tuple[_Layout, list[str] | None]:
    """Return the layout and, for CSV, the column names of line 1."""
    with _open(path) as file:
        head = file.read(_HEAD)
    first_line = head.split("\n", 1)[0].strip()
    if layout := next((log for mark, log in _LOGS if mark.search(head)), None):
        return layout, None
    if not first_line:
        raise TraceError(f"{path}, line 1: the file is empty; expected a header or a JSON object")
    if first_line.startswith("["):
        raise TraceError(f"{path}: a JSON list is no trace; a trace has one JSON object per line")
    is_json = first_line.startswith("{")
    names = (
        list(dict.fromkeys(_KEY.findall(head)))
        if is_json
        else [name.strip() for name in next(csv.reader([first_line]))]
    )
    for layout in _LAYOUTS:
        if {*layout[1:4], layout.mark or layout.time} <= set(names):
            return layout, None if is_json else names
    for mark, reason in _NO_TRACES:
        if mark.search(head):
            raise TraceError(f"{path}: {reason}")
    shown = _quote(", ".join(names))
    if is_json:
        wanted = ", ".join(_LENGTHS)
        raise TraceError(f"{path}: this JSON is no trace: it has {shown}; each line needs {wanted}")
    for layout in _LAYOUTS:
        missing = [name for name in layout[1:4] if name not in names]
        if len(missing) < 3:
            raise TraceError(f"{path}, line 1: missing column {missing[0]}; found {shown}")
    if {"\0", "\ufffd"} & set(first_line):
        raise TraceError(f"{path}, line 1: this is no text in UTF-8; unpack or convert it first")
    columns = " or ".join(",".join(layout[1:4]) for layout in _LAYOUTS[:3])
    raise TraceError(
        f"{path}, line 1: unknown header {_quote(first_line)}; expected {columns}, or JSON"
    )


def _read_clean_csv(
    path: Path, layout: _Layout, header: list[str], time_unit: TimeUnit | None
) -> _Parsed | None:
    """Read all rows at once; None as soon as anything is wrong with one of them."""
    types = {layout.context: "int64", layout.generated: "int64"}
    packing: Literal["gzip"] | None = "gzip" if _is_packed(path) else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            frame = pd.read_csv(
                path, header=0, names=header, index_col=False, dtype=types, encoding=_ENCODING,
                compression=packing,
            )  # fmt: skip
    except (ValueError, OverflowError, Warning):
        return None
    tokens = frame[list(types)].to_numpy(np.int64)
    if frame.empty or (tokens < 0).any() or (tokens >= MOST_TOKENS).any():
        return None
    times = _parse_times(path, frame[layout.time], layout, time_unit)
    if not np.isfinite(times.seconds).all() or _astray_s(times.seconds).any():
        return None
    return _clean(path, layout, times, tokens, None, frame.get(RESPONSE), 0)


def _rows(path: Path, layout: _Layout) -> Iterator[TraceRow]:
    """Rows of one file; a TraceError where it has another layout."""
    own, header = _sniff(path)
    if own.name != layout.name:
        raise TraceError(f"{path}: the layout is {own.name}, of the files before {layout.name}")
    with _open(path) as file:
        if header is not None:
            rows = _csv_rows(file, layout, header)
        else:
            rows = layout.rows(file) if layout.rows else _json_rows(file, layout)
        for row in rows:
            yield row._replace(file=str(path))


def _csv_rows(file: TextIO, layout: _Layout, header: list[str]) -> Iterator[TraceRow]:
    """Rows as CSV has them: a quoted field may go over several lines, and be of any length."""
    columns = [header.index(name) for name in layout[1:4]]
    columns += [header.index(RESPONSE)] if RESPONSE in header else []
    csv.field_size_limit(sys.maxsize)
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
            yield from (TraceRow(i, fault=str(error)) for i in range(line, reader.line_num + 1))
            continue
        if len(fields) < 2 and not "".join(fields).strip():
            continue
        if len(fields) != len(header):
            yield TraceRow(line, fault=f"{len(fields)} fields where the header has {len(header)}")
        else:
            time, context, generated, *response = (fields[i].strip() for i in columns)
            yield TraceRow(line, time, context, generated, "".join(response))


def _json_rows(file: TextIO, layout: _Layout) -> Iterator[TraceRow]:
    for line, text in enumerate(map(str.strip, file), start=1):
        if not text:
            continue
        try:
            record = json.loads(text, parse_int=str, parse_float=str)
            hashes = tuple(int(block) for block in record.get("hash_ids") or ())
            time, context, generated = (str(record[name]) for name in layout[1:4])
            response = str(record.get(RESPONSE, ""))
            yield TraceRow(line, time, context, generated, response, hashes)
        except KeyError as error:
            yield TraceRow(line, fault=f"missing column {error.args[0]}")
        except (ValueError, TypeError, AttributeError):
            wanted = ", ".join(layout[1:4])
            yield TraceRow(line, fault=f"not a JSON object with {wanted}: {_quote(text)}")


def _from_rows(
    path: Path,
    rows: list[TraceRow],
    layout: _Layout,
    time_unit: TimeUnit | None,
    on_bad_row: OnBadRow,
) -> _Parsed:
    """Build the trace from the good rows; see `read_trace` for what happens to the others."""
    if not rows:
        what = "a header" if layout.rows is None else f"lines of {layout.name}"
        raise TraceError(f"{path}, line 2: the file has {what} and no request")
    texts = pd.Series([row.time for row in rows], dtype=str)
    times = _parse_times(path, texts, layout, time_unit)
    away_s = _astray_s(times.seconds).tolist()
    faults = [
        row.fault or _find_fault(row, layout, *of_time)
        for row, *of_time in zip(rows, times.seconds.tolist(), away_s, strict=True)
    ]
    good = [i for i, fault in enumerate(faults) if fault is None]
    bad = len(rows) - len(good)
    if bad and (on_bad_row == "raise" or bad > _MOST_BAD * len(rows)):
        row, fault = next(pair for pair in zip(rows, faults, strict=True) if pair[1])
        many = f"; {bad:,} of {len(rows):,} rows are bad, and at most 1 % can be left out"
        raise TraceError(
            f"{row.file}, line {row.line}: {fault}{many if on_bad_row == 'skip' else ''}"
        )
    kept = [rows[i] for i in good]
    tokens = np.array([[int(float(r.context)), int(float(r.generated))] for r in kept], np.int64)
    hashes = None if layout.block_tokens is None else _numbered(row.hashes for row in kept)
    responses = [row.response for row in kept]
    response_s = pd.Series(responses) if any(responses) else None
    times = times._replace(seconds=times.seconds[good])
    return _clean(path, layout, times, tokens, hashes, response_s, bad)


def _numbered(chains: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Blocks by numbers in order of appearance, as hashes may be of any size."""
    numbers: dict[int, int] = {}
    return [tuple(numbers.setdefault(x, len(numbers)) for x in chain) for chain in chains]


def _find_fault(row: TraceRow, layout: _Layout, time_s: float, away_s: float) -> str | None:
    if not np.isfinite(time_s):
        return f"unparsable time {_quote(row.time)}"
    for what, text in (("context", row.context), ("generated", row.generated)):
        if not _INTEGER.fullmatch(text):
            return f"{what} tokens {_quote(text)} are no integer"
        if float(text) < 0:
            return f"negative {what} tokens {text[:_QUOTED]}"
        if float(text) >= MOST_TOKENS:
            return f"{what} tokens {text[:_QUOTED]} are beyond any prompt"
    if away_s:
        return f"time {_quote(row.time)} is {away_s:,.0f} s away from those of the other rows"
    size, context = layout.block_tokens, int(float(row.context))
    if row.hashes and size is None:
        return "nothing tells how many tokens a hash id stands for: give --block-tokens N"
    if size is not None and len(row.hashes) > -(-context // size):
        return (
            f"{len(row.hashes)} blocks of {size} tokens are more than the {context} tokens of the "
            "prompt: give --block-tokens N"
        )
    return None


def _parse_times(
    path: Path,
    texts: pd.Series[str] | pd.Series[float],
    layout: _Layout,
    time_unit: TimeUnit | None,
) -> _Times:
    """Parse numbers or dates; their origin is the first that can be read."""
    # A row in a thousand tells, as none is of both kinds.
    sample = pd.to_numeric(texts.iloc[:: 1 + len(texts) // 1000], errors="coerce")
    if sample.notna().mean() <= 0.5:
        return _parse_dates(texts)
    numbers = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64)
    ordered = np.sort(numbers[np.isfinite(numbers)])
    first, last = np.quantile(ordered, (0.05, 0.95))
    for unit, per_s in _PER_SECOND.items():
        is_asked = time_unit in (None, unit)
        if is_asked and _EPOCH_S[0] <= first / per_s and last / per_s < _EPOCH_S[1]:
            return _Times(numbers / per_s, datetime(1970, 1, 1, tzinfo=UTC), f"{unit} since 1970")
    unit = time_unit or _tell_unit(path, layout, ordered)
    return _Times(numbers / _PER_SECOND[unit], None, f"times in {unit}")


def _parse_dates(texts: pd.Series[str] | pd.Series[float]) -> _Times:
    dates = pd.to_datetime(texts, format="ISO8601", utc=True, errors="coerce")
    # 0001-01-01 and 9999-12-31 stand for no time at all, and differ too much from one.
    dates = dates.where(dates.dt.year.between(*_YEARS))
    readable = dates.dropna()
    if readable.empty:
        return _Times(np.full(len(dates), np.nan), None, "dates")
    origin = readable.iloc[0]
    seconds = (dates - origin).dt.as_unit("ns") / pd.Timedelta(1, "s")
    return _Times(np.asarray(seconds, np.float64), origin.floor("us").to_pydatetime(), "dates")


def _tell_unit(path: Path, layout: _Layout, ordered: FloatArray) -> TimeUnit:
    """The unit of the layout at which requests come at a believable rate.

    Raises:
        TraceError: There is none, or more than one.
    """
    bulk = _bulk(ordered)
    span = float(bulk[-1] - bulk[0])
    rates = {unit: (len(bulk) - 1) * per / span for unit, per in _PER_SECOND.items() if span > 0}
    units = layout.units if (ordered % 1).any() else layout.units[:1]
    low, high = _RATES_PER_S
    believed = [unit for unit in units if low <= rates.get(unit, 1.0) <= high]
    if len(believed) == 1:
        return believed[0]
    would_be = ", ".join(f"{rate:,.3g} a second in {unit}" for unit, rate in rates.items())
    raise TraceError(
        f"{path}: nothing tells the unit of {layout.time!r} for certain; its {len(ordered):,} rows "
        f"would be {would_be or 'at one instant'}: give --time-unit s|ms|us|ns"
    )


def _bulk(ordered: FloatArray) -> FloatArray:
    """All but a twentieth at both ends."""
    trim = max(1, len(ordered) // 20) if len(ordered) >= _FEW else 0
    return ordered[trim : len(ordered) - trim]


def _astray_s(seconds: FloatArray) -> FloatArray:
    """How far rows are from the others whose clock must be wrong, seconds; 0 for all other rows."""
    bulk = _bulk(np.sort(seconds[np.isfinite(seconds)]))
    if len(seconds) < _FEW or not len(bulk) or bulk[0] == bulk[-1]:
        return np.zeros(len(seconds))
    span_s = bulk[-1] - bulk[0]
    away_s = np.fmax(np.fmax(bulk[0] - seconds, seconds - bulk[-1]), 0.0)
    above = np.fmax.accumulate(seconds)
    below = np.fmin.accumulate(seconds[::-1])[::-1]
    in_order = (seconds >= above) & (seconds <= below)
    beside, apart = _LULL_S
    most_s = np.where(in_order, max(100 * span_s, apart), max(span_s, beside))
    return np.where(away_s > most_s, away_s, 0.0)


def _seconds(texts: pd.Series[str] | pd.Series[float]) -> FloatArray:
    """Numbers above 0; NaN where there is none."""
    numbers = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64)
    return np.where(np.isfinite(numbers) & (numbers > 0), numbers, np.nan)


def _check_blocks(path: Path, trace: Trace) -> None:
    """Refuse a size of blocks of which prompts have another number: layouts tell whole prompts.

    Raises:
        TraceError: One in ten has more than that.
    """
    size = trace.prefix_block_tokens or 1
    counts = np.array([len(chain) for chain in trace.prefix_hashes or ()])
    fits = np.abs(counts - trace.context_tokens[: len(counts)] / size)[counts > 0] < 1
    if len(fits) >= _FEW and fits.mean() < 0.9:
        raise TraceError(
            f"{path}: {len(fits) - fits.sum():,} of {len(fits):,} prompts have fewer hash ids than "
            f"blocks of {size} tokens: give --block-tokens N"
        )


def _clean(
    path: Path,
    layout: _Layout,
    times: _Times,
    tokens: IntArray,
    hashes: list[tuple[int, ...]] | None,
    responses: pd.Series[str] | pd.Series[float] | None,
    bad: int,
) -> _Parsed:
    """Drop failed requests, sort the rest, and describe the trace."""
    seconds = times.seconds
    # BurstGPT's traces and logs hold requests that failed, by an answer of no token.
    has_failures = layout.rows is not None or layout.name == "BurstGPT"
    kept = np.flatnonzero((tokens[:, 1] > 0) | (not has_failures))
    if not len(kept):
        raise TraceError(f"{path}: all {len(tokens):,} requests failed: none has a token of answer")
    failed = len(tokens) - len(kept)
    moved = int((seconds[kept] < np.maximum.accumulate(seconds[kept])).sum())
    kept = kept[np.argsort(seconds[kept], kind="stable")]
    first_s = float(seconds[kept[0]])
    trace = Trace(
        arrival_s=seconds[kept] - first_s,
        context_tokens=tokens[kept, 0],
        generated_tokens=tokens[kept, 1],
        started_at=times.origin and times.origin + pd.Timedelta(first_s, "s").to_pytimedelta(),
        prefix_hashes=None if hashes is None else tuple(hashes[i] for i in kept.tolist()),
        prefix_block_tokens=None if hashes is None else layout.block_tokens,
        response_s=None if responses is None else _seconds(responses)[kept],
    )
    blocks = f"blocks of {layout.block_tokens} tokens, " if trace.prefix_hashes else ""
    rows = f"rows: {trace.num_requests:,}, span: {trace.duration_s:,.6g} s"
    described = f"layout {layout.name}, {times.unit}, {blocks}{rows}"
    described += "" if trace.response_s is None else ", with measured response times"
    for what, count in (
        ("out of order, now sorted", moved), ("failed, without an answer, left out", failed),
        ("bad, left out", bad),
    ):  # fmt: skip
        described += f"; {what}: {count:,}" if count else ""
    return trace, bad, described
