"""The gateway's decision log, read back: what was known, chosen, and what came of it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.routing.fleet import MeasuredReplica
from tokenyard.routing.log_replay import Window
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.types import EngineSnapshot, OrderKey, ReplicaSnapshot, Request
from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.trace import Trace

_ENGINE = EngineSnapshot.__dataclass_fields__.keys()
_SNAPSHOT = ReplicaSnapshot.__dataclass_fields__.keys() - {"engine", "queue"}
"""Fields that are logged; what waits at a replica one by one is not."""
_DONE = ("stop", "length")
FORMAT_VERSIONS = (5, 6)
"""Of logs that can be read: what this release writes, and what the one before it wrote."""


@dataclass(frozen=True)
class LoggedDecision:
    """One row of the log: the first time that a request was placed."""

    request: Request
    snapshots: tuple[ReplicaSnapshot, ...]
    index: int
    outcome: str
    output_tokens: int
    ttft_s: float
    response_s: float
    policy: str
    order_key: OrderKey | None = None
    """By what it waited, Unix time, seconds; None: behind all that were there."""

    @property
    def replica_id(self) -> str:
        """Where it went."""
        return self.snapshots[self.index].replica_id


@dataclass(frozen=True, eq=False)
class LoggedOutcomes:
    """When requests came, who decided, and what became of them; arrays of shape (num,)."""

    arrival_s: FloatArray
    """Unix time, seconds, in order."""
    response_s: FloatArray
    """Infinite where it was not completed."""
    context_tokens: FloatArray
    output_tokens: FloatArray
    policy: npt.NDArray[np.str_]
    """`name@sha256`."""
    simulated_s: FloatArray | None = None
    """Responses in a simulator, under one policy; None: nobody has asked one."""

    def __len__(self) -> int:
        """How many requests."""
        return len(self.arrival_s)

    def where(self, chosen: npt.NDArray[np.bool_] | slice) -> LoggedOutcomes:
        """Some of them."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = {name: column[chosen] for name, column in columns.items() if column is not None}
        return LoggedOutcomes(**kept)

    def between(self, from_s: float, to_s: float) -> LoggedOutcomes:
        """Those that came in a span of time, Unix time, seconds."""
        return self.where((self.arrival_s >= from_s) & (self.arrival_s < to_s))

    def newest(self, count: int) -> LoggedOutcomes:
        """The last ones."""
        return self.where(slice(-count, None))

    def longest_s(self) -> float:
        """Longest response of those that were completed; 0: none was."""
        return float(max(self.response_s[np.isfinite(self.response_s)], default=0.0))

    def mean_over_simulated(self, unanswered_s: float) -> float:
        """Mean response over the simulator's, or in seconds where there is none.

        What was not completed counts as `unanswered_s`.
        """
        simulated_s = 1.0 if self.simulated_s is None else float(self.simulated_s.mean())
        return float(np.minimum(self.response_s, unanswered_s).mean()) / simulated_s

    def attained(self, slo_s: float) -> float:
        """Share that was answered within an SLO."""
        return float((self.response_s <= slo_s).mean())

    @property
    def trace(self) -> Trace:
        """What was asked, from the first arrival on; answers are as long as they had become."""
        output_tokens = np.maximum(self.output_tokens, 1.0).astype(np.int64)
        arrival_s = self.arrival_s - self.arrival_s[0]
        return Trace(arrival_s, self.context_tokens.astype(np.int64), output_tokens)

    def traffic(self) -> tuple[float, float, float]:
        """Requests a second, and mean prompt and answer, tokens."""
        trace = self.trace
        means = trace.context_tokens.mean(), trace.generated_tokens.mean()
        return len(self) / max(trace.duration_s, 1e-3), max(float(means[0]), 1.0), float(means[1])


def read_outcomes(folder: Path, since_s: float) -> LoggedOutcomes:
    """Read what became of requests in a decision log, without what was known of replicas.

    Args:
        folder: Of the log.
        since_s: Unix time of the first arrival that counts, seconds.

    Raises:
        ValueError: There is no log, a file is not one of a decision log, or of another release.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ["arrival_s", "response_s", "context_tokens", "output_tokens", "policy"]
    checked = ["request_id", "attempt", "outcome", "format_version"]
    tables = [pa.table({name: [] for name in (*columns, *checked)})]
    for file in _files(folder, since_s):
        try:
            table = pq.read_table(file, columns=[*columns, *checked])
        except (pa.ArrowException, KeyError) as error:
            raise ValueError(f"{file} is no decision log: {error!r}") from None
        _check_versions(set(table["format_version"].to_pylist()), file)
        tables.append(table)
    table = pa.concat_tables(tables, promote_options="permissive")
    frame = table.to_pandas().sort_values(["arrival_s", "attempt"])
    # The last attempt is the one that was answered, if any was.
    frame = frame[frame["arrival_s"] >= since_s].drop_duplicates("request_id", keep="last")
    answered = frame["outcome"].isin(_DONE)
    response_s = frame["response_s"].where(answered, math.inf).fillna(math.inf)
    numbers = {name: frame[name].to_numpy(np.float64) for name in columns[2:4]}
    return LoggedOutcomes(
        frame["arrival_s"].to_numpy(np.float64), response_s.to_numpy(np.float64),
        **numbers, policy=frame["policy"].to_numpy(np.str_),
    )  # fmt: skip


def _files(folder: Path, since_s: float) -> list[Path]:
    """Files of a log that may hold requests that came at that Unix time or later."""
    files = sorted(folder.glob("decisions-*.parquet"))
    if not files:
        raise ValueError(f"no decisions-*.parquet in {folder}: deploy with --decision-log")
    return [file for file in files if file.stat().st_mtime >= since_s]


def read_log(folder: Path, since_s: float = -math.inf) -> tuple[list[LoggedDecision], str]:
    """Read all files of a gateway's decision log.

    Args:
        folder: Of the log.
        since_s: Unix time of the first arrival that counts, seconds.

    Returns:
        Decisions in order of arrival, without those that repeat a request, and a hash of the files.

    Raises:
        ValueError: There is none, a file is not one of a decision log, or of another release, or no
            request was placed.
    """
    # Training and serving do without it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    digest, logged = hashlib.sha256(), []
    for file in _files(folder, since_s):
        digest.update(file.read_bytes())
        try:
            rows = pq.read_table(file).to_pylist()
            _check_versions({row["format_version"] for row in rows}, file)
            logged += [_decision(row) for row in rows if row["attempt"] == 0 and row["candidates"]]
        except (pa.ArrowException, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no decision log: {error!r}") from None
    logged = [decision for decision in logged if decision.request.arrival_s >= since_s]
    if not logged:
        raise ValueError(f"the decision log in {folder} holds no request that was placed")
    logged.sort(key=lambda decision: decision.request.arrival_s)
    return logged, digest.hexdigest()[:12]


def _check_versions(versions: set[int], file: Path) -> None:
    for other in versions.difference(FORMAT_VERSIONS):
        known = " and ".join(map(str, FORMAT_VERSIONS))
        raise ValueError(f"{file} has format version {other}; this release reads {known}")


def fleet_of(decisions: Sequence[LoggedDecision], base: Scenario, name: str) -> Scenario:
    """The replicas that were logged, with the traffic model and the SLOs of `base`.

    Raises:
        ValueError: `base` has no fleet, or what was logged does not batch.
    """
    declared = base.required_fleet
    newest: dict[str, ReplicaSnapshot] = {}
    for decision in decisions:
        for snapshot in decision.snapshots:
            newest[snapshot.replica_id] = snapshot
    replicas = []
    for number, replica_id in enumerate(sorted(newest)):
        engine = newest[replica_id].engine
        if engine is None:
            raise ValueError(f"replica {replica_id!r} was logged without an engine")
        replicas.append(
            MeasuredReplica(
                name=f"r{number}", max_batch=newest[replica_id].num_slots,
                token_budget=max(engine.token_budget, newest[replica_id].num_slots + 1),
                iteration_s=engine.iteration_s, prefill_token_s=engine.prefill_token_s,
                sequence_s=engine.sequence_s, kv_token_s=engine.kv_token_s,
                kv_capacity_tokens=engine.kv_capacity_tokens,
            )
        )  # fmt: skip
    span_s = decisions[-1].request.arrival_s - decisions[0].request.arrival_s
    rate = {"load": None, "rate_per_s": len(decisions) / max(span_s, 1.0)}
    fleet = declared.model_copy(update={"replicas": tuple(replicas), "churn": None})
    return base.model_copy(
        update={
            "name": name, "fleet": fleet, "held_out_trace": None, "sessions": None,
            "arrivals": base.arrivals.model_copy(update=rate | {"diurnal": None}),
        }
    )  # fmt: skip


def windows_of(decisions: Sequence[LoggedDecision], count: int) -> list[Window]:
    """Cut a log into `count` windows of equally many requests, in order of time.

    Raises:
        ValueError: There are fewer than 20 requests for each, or no window.
    """
    if count < 1:
        raise ValueError(f"{count} windows must be at least 1")
    size = len(decisions) // count
    if size < 20:
        raise ValueError(f"{len(decisions)} logged requests are too few for {count} windows")
    servers = server_indices(decisions)
    return [
        _window(decisions[start : start + size], servers[start : start + size])
        for start in range(0, count * size, size)
    ]


def server_indices(decisions: Sequence[LoggedDecision]) -> IntArray:
    """Where every request went, as `fleet_of` numbers replicas, shape (num_decisions,)."""
    known = {snapshot.replica_id for decision in decisions for snapshot in decision.snapshots}
    number = {replica_id: index for index, replica_id in enumerate(sorted(known))}
    return np.array([number[decision.replica_id] for decision in decisions], dtype=np.int64)


def served_policy(decisions: Sequence[LoggedDecision]) -> str:
    """`name@sha256` of the policy that placed most of the logged requests."""
    ((label, _),) = Counter(decision.policy for decision in decisions).most_common(1)
    return label


def trace_of(decisions: Sequence[LoggedDecision]) -> Trace:
    """What was asked, from the first arrival on, with the true output lengths."""
    arrival_s = np.array([decision.request.arrival_s for decision in decisions])
    return Trace(
        arrival_s - arrival_s[0],
        np.array([decision.request.context_tokens for decision in decisions], dtype=np.int64),
        np.array([max(decision.output_tokens, 1) for decision in decisions], dtype=np.int64),
    )


def _window(decisions: Sequence[LoggedDecision], server: IntArray) -> Window:
    done = np.array([decision.outcome in _DONE for decision in decisions])
    response_s = np.array([decision.response_s for decision in decisions])
    ttft_s = np.array([decision.ttft_s for decision in decisions])
    keys = _order_keys(decisions) - decisions[0].request.arrival_s
    return Window(trace_of(decisions), server, np.where(done, response_s, np.nan), ttft_s, keys)


def _order_keys(decisions: Sequence[LoggedDecision]) -> FloatArray:
    """By what each waited, Unix time, seconds, shape (num_decisions, 3), as `Window.order_keys`."""
    keys = [
        OrderKey(math.nan) if decision.order_key is None else decision.order_key
        for decision in decisions
    ]
    return np.array(keys, dtype=np.float64)


def _decision(row: dict[str, Any]) -> LoggedDecision:
    return LoggedDecision(
        request=Request(row["arrival_s"], row["context_tokens"], row["predicted_total_tokens"]),
        snapshots=tuple(_snapshot(candidate) for candidate in row["candidates"]),
        index=row["index"],
        outcome=row["outcome"],
        output_tokens=row["output_tokens"],
        ttft_s=_or_nan(row["ttft_s"]),
        response_s=_or_nan(row["response_s"]),
        policy=row["policy"],
        order_key=_order_key(row),
    )


def _order_key(row: dict[str, Any]) -> OrderKey | None:
    key_s, *late = (row[name] for name in ("order_key_s", "late_at_s", "late_key_s"))
    return None if key_s is None else OrderKey(key_s, *(math.inf if s is None else s for s in late))


def _snapshot(fields: dict[str, Any]) -> ReplicaSnapshot:
    engine = {key: fields.get(key) for key in _ENGINE}
    known = {key: _or_nan(fields[key]) for key in _SNAPSHOT}
    has_engine = engine["iteration_s"] is not None
    return ReplicaSnapshot(**known, engine=EngineSnapshot(**engine) if has_engine else None)  # type: ignore[arg-type]


def _or_nan(value: Any) -> Any:
    return float("nan") if value is None else value
