"""Rows of the decision log, made column by column, since most data is columns already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pyarrow as pa

from serve_app.gateway.decision_record import DecisionRecord
from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing import snapshot_table as st
from tokenyard.routing.snapshot_table import SnapshotTable
from tokenyard.types import FloatArray

FORMAT_VERSION = 6

_FIXED = {
    "tokens_per_s": st.STATE_TOKENS_PER_S,
    "num_slots": st.STATE_MAX_BATCH,
    "max_concurrency": st.STATE_MAX_BATCH,
    "iteration_s": st.STATE_ITERATION_S,
    "prefill_token_s": st.STATE_PREFILL_TOKEN_S,
    "sequence_s": st.STATE_SEQUENCE_S,
    "kv_token_s": st.STATE_KV_TOKEN_S,
    "token_budget": st.STATE_TOKEN_BUDGET,
    "kv_capacity_tokens": st.STATE_KV_CAPACITY_TOKENS,
}
"""Fields of a candidate by columns of `Candidates.fixed`."""
_LIVE = {
    "num_waiting": st.LIVE_NUM_WAITING,
    "num_running": st.LIVE_NUM_RUNNING,
    "mean_response_s": st.LIVE_RESPONSE_S,
    "observed_at_s": st.LIVE_OBSERVED_AT_S,
    "kv_used_fraction": st.LIVE_KV_USED_FRACTION,
    "prefill_in_flight_tokens": st.LIVE_PREFILL_TOKENS,
    "output_in_flight_tokens": st.LIVE_OUTPUT_TOKENS,
    "match_tokens": st.LIVE_MATCH_TOKENS,
}
"""Fields of a candidate by columns of `SnapshotTable.live`."""
_CANDIDATE = pa.struct([
    ("replica_id", pa.string()), ("tokens_per_s", pa.float64()), ("num_slots", pa.int64()),
    ("max_concurrency", pa.int64()), ("num_waiting", pa.int64()), ("num_running", pa.int64()),
    ("tokens_in_flight", pa.float64()), ("predicted_wait_s", pa.float64()),
    ("mean_response_s", pa.float64()), ("observed_at_s", pa.float64()),
    ("iteration_s", pa.float64()), ("prefill_token_s", pa.float64()), ("sequence_s", pa.float64()),
    ("kv_token_s", pa.float64()), ("token_budget", pa.int64()),
    ("kv_capacity_tokens", pa.float64()), ("kv_used_fraction", pa.float64()),
    ("prefill_in_flight_tokens", pa.float64()), ("output_in_flight_tokens", pa.float64()),
    ("match_tokens", pa.int64()), ("pool", pa.string()), ("score", pa.float64()),
])  # fmt: skip
_OWN = [
    ("decision_id", pa.string()), ("request_id", pa.string()), ("attempt", pa.int64()),
    ("time_s", pa.float64()), ("policy", pa.string()), ("service_class", pa.string()),
    ("index", pa.int64()), ("propensity", pa.float64()), ("explored", pa.bool_()),
    ("fallback_reason", pa.string()), ("decision_us", pa.float64()), ("outcome", pa.string()),
    ("output_tokens", pa.int64()), ("ttft_s", pa.float64()), ("response_s", pa.float64()),
    ("arm", pa.string()), ("mlflow_run", pa.string()), ("num_sends", pa.int64()),
]  # fmt: skip
"""Fields of the record itself, and of its choice."""
_OF_RECORD = frozenset(field.name for field in fields(DecisionRecord))
_ORDER_KEY = [
    ("order_key_s", pa.float64()), ("late_at_s", pa.float64()), ("late_key_s", pa.float64()),
]  # fmt: skip
_NO_ORDER = (math.inf,) * len(_ORDER_KEY)
_REQUEST = [
    ("arrival_s", pa.float64()), ("context_tokens", pa.int64()),
    ("predicted_total_tokens", pa.float64()),
]  # fmt: skip
SCHEMA = pa.schema([
    ("format_version", pa.int64()), *_OWN, *_ORDER_KEY, *_REQUEST, ("replica_id", pa.string()),
    ("candidates", pa.list_(pa.field("element", _CANDIDATE))),
])  # fmt: skip

REPEATED = [
    "policy", "service_class", "outcome", "arm", "replica_id",
    "candidates.list.element.replica_id", "candidates.list.element.pool",
]  # fmt: skip
"""Columns that Parquet keeps as dictionaries: for numbers it would take five times as long."""


def lay_out(records: Sequence[DecisionRecord]) -> pa.Table:
    """Make one row of every record; NaN becomes null, as do infinite parts of a key."""
    choices = [record.choice for record in records]
    requests = [choice.request for choice in choices]
    columns = [pa.array(np.full(len(records), FORMAT_VERSION), pa.int64())]
    for name, kind in _OWN:
        rows = records if name in _OF_RECORD else choices
        columns.append(_column([getattr(row, name) for row in rows], kind))
    keys = np.array([record.order_key or _NO_ORDER for record in records], dtype=np.float64)
    columns += [pa.array(part, mask=~np.isfinite(part)) for part in keys.T]
    columns += [
        _column([getattr(request, name) for request in requests], kind) for name, kind in _REQUEST
    ]
    chosen = [_ids(choice)[choice.index] for choice in choices]
    columns += [_column(chosen, pa.string()), _candidates(records)]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, kind, from_pandas=True)


def _ids(choice: ReplicaChoice) -> Sequence[str]:
    snapshots = choice.snapshots
    if isinstance(snapshots, SnapshotTable):
        return snapshots.candidates.replica_ids
    return [snapshot.replica_id for snapshot in snapshots]


def _candidates(records: Sequence[DecisionRecord]) -> pa.ListArray:
    choices = [record.choice for record in records]
    tables = [choice.snapshots for choice in choices if isinstance(choice.snapshots, SnapshotTable)]
    if len(tables) == len(records):
        candidates = _of_tables(tables, [choice.scores for choice in choices])
    else:
        rows = [row for record in records for row in _rows(record.choice, record.pools)]
        candidates = pa.array(rows, _CANDIDATE, from_pandas=True)
    ends = np.cumsum([0, *(len(choice.snapshots) for choice in choices)])
    offsets = pa.array(ends, pa.int32())
    return pa.ListArray.from_arrays(offsets, candidates).cast(SCHEMA.field("candidates").type)


def _rows(choice: ReplicaChoice, pools: Sequence[str]) -> list[dict[str, Any]]:
    """Make a dictionary of each candidate that is an object."""
    rows = []
    for number, snapshot in enumerate(choice.snapshots):
        row = asdict(snapshot)
        engine = row.pop("engine") or {}
        score = None if choice.scores is None else float(choice.scores[number])
        rows.append(row | engine | {"pool": pools[number], "score": score})
    return rows


def _of_tables(
    tables: Sequence[SnapshotTable], scores: Sequence[FloatArray | None]
) -> pa.StructArray:
    # One column after the other, as they are read.
    fixed = np.ascontiguousarray(np.concatenate([table.candidates.fixed for table in tables]).T)
    live = np.ascontiguousarray(np.concatenate([table.live for table in tables]).T)
    numbers = {name: fixed[at] for name, at in _FIXED.items()}
    numbers |= {name: live[at] for name, at in _LIVE.items()}
    numbers["tokens_in_flight"] = live[st.LIVE_PREFILL_TOKENS] + live[st.LIVE_OUTPUT_TOKENS]
    numbers["predicted_wait_s"] = np.full(live.shape[1], np.nan)
    numbers["score"] = np.concatenate(
        [
            np.full(len(table), np.nan) if scored is None else scored
            for table, scored in zip(tables, scores, strict=True)
        ]
    )
    texts = {
        "replica_id": _texts([table.candidates.replica_ids for table in tables]),
        "pool": _texts([table.candidates.pools for table in tables]),
    }
    arrays = [
        texts[field.name] if field.name in texts else _numbers(numbers[field.name], field.type)
        for field in _CANDIDATE
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(_CANDIDATE))


def _numbers(values: FloatArray, kind: pa.DataType) -> pa.Array:
    if kind == pa.int64():
        return pa.array(values.astype(np.int64))
    missing = np.isnan(values)
    return pa.array(values, mask=missing if missing.any() else None)


def _texts(groups: Sequence[tuple[str, ...]]) -> pa.Array:
    """Return the names of replicas; many decisions are between the same ones."""
    different = {id(group): group for group in groups}
    made = {number: pa.array(group, pa.string()) for number, group in different.items()}
    return pa.concat_arrays([made[id(group)] for group in groups])
