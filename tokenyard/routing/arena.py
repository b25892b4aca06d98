"""The arena: routing policies ranked over many clusters, loads and kinds of traffic.

A cell is one workload on one fleet at one load. All entries of a cell decide the same streams.
An entry's regret is how much longer its mean response is than that of the cell's best rule in
hindsight. That rule is chosen on half of the streams and compared on the other half, both ways, so
that no rule is judged on the streams it was chosen on.

The fleets and loads of sealed cells are drawn when the arena runs: only their distribution is known
(`drawn_clusters.draw_cluster`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np

from tokenyard.evaluation import Map
from tokenyard.problem import Candidate, Row
from tokenyard.routing.artifact import DEFAULT, default_rule
from tokenyard.routing.drawn_clusters import Kind as DrawnKind
from tokenyard.routing.drawn_clusters import draw_cluster
from tokenyard.routing.evaluation import per_stream
from tokenyard.routing.policies import is_rule
from tokenyard.routing.policy_file import SUFFIX
from tokenyard.routing.policy_url import PolicyOfUrl, is_url
from tokenyard.routing.problem import CHAMPION, PROBLEM
from tokenyard.routing.scenario import NO_REWARD, Scenario, load_scenario
from tokenyard.routing.simulator.run import Run, run_policy
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    recorded_windows,
    synthetic_streams,
)
from tokenyard.statistics.intervals import holm, paired_p_value, t_interval
from tokenyard.types import FloatArray
from tokenyard.workload.paths import find_trace

EntryKind = Literal["rule", "learned", "file", "url", "live"]
MEAN = "mean_response_s"
SHOWN = (
    MEAN, "p99_response_s", "mean_ttft_s", "p99_ttft_s", "slo_violation_fraction", "goodput_per_s",
    "dropped_fraction",
)  # fmt: skip
"""Measures of a row; those of first tokens are of fleets only."""
_THEIRS = ("file", "url")
ALL = "all"
"""Cell of the rows that sum up an entry."""
SIGNIFICANT = 0.05
"""p-value below which a regret counts as not zero, corrected for the entries of its cell."""
MOST_ENTRY_S = 60.0
"""Time that the rule of a file, or a URL, may take in a cell."""
FAILED = "failed_decisions_fraction"
"""Share of a URL's decisions that failed, and went round robin."""

_QUICK: tuple[tuple[str, float | None], ...] = (
    ("poisson_085", None), ("azure_code_slo", None), ("conversation_mixed_gpus", 0.5),
    ("multi_turn_prefix", None), ("code_generation@mixed", None),
)  # fmt: skip
"""Scenarios and their loads; None: their own."""
_MORE: tuple[tuple[str, float | None], ...] = (
    ("conversation", None), ("poisson_050", None), ("poisson_095", None), ("bursty_serial", None),
    ("homogeneous", None), ("slotted", None), ("thirty_two", None), ("azure_code_mixed_gpus", None),
    ("azure_code_slo", 0.5), ("conversation_mixed_gpus", None), ("stale_signals", None),
    ("two_classes_slo", None), ("conversation_measured_gpus", None), ("churn", None),
    ("emulated", None), ("local_cpu", None), ("agentic_trace_replay@mixed", None),
    ("batch_summarization_rag@mixed", None), ("deep_research@equal", None),
    ("interactive_chat@mixed", None), ("mooncake_toolagent@equal", None), ("reasoning@mixed", None),
    ("conversation_drift@jitter", None),
)  # fmt: skip
_RECORDED = ("bursty_serial", "azure_code_mixed_gpus", "conversation_mixed_gpus")
"""Scenarios whose recorded test part is a cell too, where its file is found."""
_QUICK_SEALED: tuple[DrawnKind, ...] = ("engines",)
_MORE_SEALED: tuple[DrawnKind, ...] = ("servers", "slots", "engines")


@dataclass(frozen=True)
class Size:
    """How much of each cell is played."""

    streams: int
    requests: int
    """In a stream."""


QUICK, USUAL, FULL = Size(6, 1000), Size(8, 2000), Size(30, 2000)


@dataclass(frozen=True)
class Cell:
    """One workload on one fleet at one load."""

    name: str
    scenario: Scenario
    load: float
    """Offered, as if nothing were cached."""
    is_sealed: bool = False
    is_recorded: bool = False
    """Streams are windows of the scenario's recorded test part."""


@dataclass(frozen=True)
class Entry:
    """Somebody who routes."""

    name: str
    kind: EntryKind
    policy: str
    """As `Routing.candidate` takes it."""


@dataclass(frozen=True)
class Match:
    """One entry in one cell."""

    entry: Entry
    cell: Cell
    size: Size
    seed: int
    """Of the streams."""


Measured = Mapping[str, FloatArray]
"""Measures by stream, shape (num_streams,) each."""


def find_cells(quick: bool, sealed_seed: int) -> list[Cell]:
    """Return the 32 cells, or 6 without recordings; `sealed_seed` draws the last ones."""
    loads = _QUICK if quick else _QUICK + _MORE
    kinds = _QUICK_SEALED if quick else _QUICK_SEALED + _MORE_SEALED
    drawn = [
        draw_cluster(np.random.default_rng([sealed_seed, i]), kind) for i, kind in enumerate(kinds)
    ]
    recorded = [] if quick else list(filter(_is_available, map(load_scenario, _RECORDED)))
    cells = [_cell(load_scenario(name), load) for name, load in loads]
    cells += [
        Cell(f"{entry.name}, recorded", entry, StreamSource(entry).offered_load, is_recorded=True)
        for entry in recorded
    ]
    return cells + [
        _cell(cluster.model_copy(update={"name": f"sealed_{kind}_{i}"}), None, is_sealed=True)
        for i, (cluster, kind) in enumerate(zip(drawn, kinds, strict=True))
    ]


def _is_available(scenario: Scenario) -> bool:
    """Return whether the recorded test part is on this machine."""
    held_out = scenario.held_out_trace
    return held_out is not None and find_trace(held_out.name) is not None


def _cell(scenario: Scenario, load: float | None, is_sealed: bool = False) -> Cell:
    source = StreamSource(scenario)
    load = source.offered_load if load is None else load
    at_load = f"at {load:.2f}"
    if scenario.arrivals.process == "closed":
        factor = load / source.offered_load
        at_load = f"with {scenario.num_clients(factor * source.rate_per_s)} clients"
    return Cell(f"{scenario.name} {at_load}", scenario, load, is_sealed)


def entries_of(cell: Cell, own: Sequence[str]) -> list[Entry]:
    """Return every rule whose signals the cell has, the default, what ships, files and URLs."""
    names = dict.fromkeys(PROBLEM.policies_for(cell.scenario))
    names.pop(CHAMPION, None)
    rules = [Entry(name, "rule", name) for name in names if _candidate(cell.scenario, name)]
    rules.append(Entry(DEFAULT, "rule", default_rule(cell.scenario)))
    champion = _candidate(cell.scenario, CHAMPION)
    # A champion that is a rule plays under the rule's name.
    ships = champion is not None and champion.rule is None
    trained = [Entry(CHAMPION, "learned", CHAMPION)] if ships else []
    return rules + trained + [Entry(_shown(path, own), _kind(path), path) for path in own]


def _shown(policy: str, own: Sequence[str]) -> str:
    """Return a URL, or the name of a file, with its path if another entry has that name."""
    name = Path(policy).stem
    alike = {path for path in own if Path(path).stem == name}
    if is_url(policy) or len(alike) > 1 or is_rule(name) or name in (CHAMPION, DEFAULT):
        return policy
    return name


def _kind(policy: str) -> EntryKind:
    if is_url(policy):
        return "url"
    return "file" if policy.endswith(SUFFIX) else "learned"


def _candidate(scenario: Scenario, name: str) -> Candidate[Scenario, StreamSet, Run] | None:
    """Return a policy that ships; None if it cannot play, such as a rule that is not tuned."""
    try:
        return PROBLEM.candidate(scenario, name)
    except ValueError:
        return None


def play(match: Match) -> Measured:
    """Run an entry's policy on the streams of a cell.

    Raises:
        ValueError: The entry cannot play this cell, or failed.
    """
    scenario, streams = streams_of(match)
    if match.entry.kind == "url":
        return _play_url(match, scenario, streams)
    runs = PROBLEM.candidate(scenario, match.entry.policy).run(scenario, streams, match.seed)
    return _shown_of(scenario, runs)


def _shown_of(scenario: Scenario, runs: Sequence[Run]) -> Measured:
    measured = per_stream(scenario, runs)
    return {key: measured[key] for key in SHOWN if key in measured}


def _play_url(match: Match, scenario: Scenario, streams: StreamSet) -> Measured:
    """Play with a URL's decisions, and count those that failed."""
    remotes: list[PolicyOfUrl] = []

    def factory(rng: np.random.Generator) -> PolicyOfUrl:
        remotes.append(PolicyOfUrl(match.entry.policy))
        return remotes[-1]

    runs = run_policy(scenario, streams, factory, match.seed)
    failed = [p.num_failed / len(s) for p, s in zip(remotes, streams.requests, strict=True)]
    for remote in remotes:
        remote.close()
    return {**_shown_of(scenario, runs), FAILED: np.array(failed)}


@lru_cache(maxsize=2)
def _drawn(
    text: str, load: float, size: Size, seed: int, is_recorded: bool
) -> tuple[Scenario, StreamSet]:
    scenario = Scenario.model_validate_json(text)
    source = StreamSource(scenario)
    if is_recorded:
        return scenario, recorded_windows(source, size.streams)
    factor = load / source.offered_load
    return scenario, synthetic_streams(source, size.streams, seed, load_factor=factor)


def streams_of(match: Match) -> tuple[Scenario, StreamSet]:
    """Return the scenario, without rewards, and the streams of a match."""
    cell = match.cell
    changed = {"requests_per_stream": match.size.requests, "reward": NO_REWARD}
    scenario = cell.scenario.model_copy(update=changed)
    # Scenarios have no hash; equal text is an equal scenario.
    text = scenario.model_dump_json()
    return _drawn(text, cell.load, match.size, match.seed, cell.is_recorded)


def play_all(matches: Sequence[Match], mapped: Map) -> list[Measured | str]:
    """Play matches; return the measures of each, or a sentence on why it failed.

    Rules of files and URLs may hang, so each plays in a process of its own.
    """
    ours = [match for match in matches if match.entry.kind not in _THEIRS]
    results = dict(zip(map(id, ours), mapped(_try, ours), strict=True))
    theirs = {id(match): _play_apart(match) for match in matches if match.entry.kind in _THEIRS}
    return [(results | theirs)[id(match)] for match in matches]


def _try(match: Match) -> Measured | str:
    try:
        return play(match)
    except ValueError as error:
        return " ".join(str(error).split())


def _play_apart(match: Match) -> Measured | str:
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(match, there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(MOST_ENTRY_S):
            return f"{match.entry.name} took more than {MOST_ENTRY_S:g} s"
        result: Measured | str = here.recv()
        return result
    except EOFError:
        return f"{match.entry.name} ended its process"
    finally:
        process.kill()
        process.join()


def _send_result(match: Match, there: Connection) -> None:
    there.send(_try(match))


def hindsight_s(rules: Mapping[str, FloatArray]) -> tuple[FloatArray, tuple[str, str]]:
    """Return the mean responses of the best rule, chosen on the other half of the streams.

    Times have shape (num_streams,). The rules that even and odd streams are compared with follow.
    """
    names, times_s = list(rules), np.array(list(rules.values()))
    chosen = [int(times_s[:, 1 - half :: 2].mean(axis=1).argmin()) for half in (0, 1)]
    best_s = times_s[chosen[0]].copy()
    best_s[1::2] = times_s[chosen[1], 1::2]
    return best_s, (names[chosen[0]], names[chosen[1]])


def rows_of_cell(
    cell: str, load: float, results: Mapping[Entry, Measured], seed: int, mean: str = MEAN
) -> list[Row]:
    """Return a row per entry, best `mean` first; docs/metrics.md defines the keys.

    Regret is to the best rule in hindsight, of live entries to the best router.
    """
    rules = {
        entry.name: results[entry][mean] for entry in results if entry.kind in ("rule", "live")
    }
    best_s, names = hindsight_s(rules)
    corrected = holm([paired_p_value(measured[mean] - best_s) for measured in results.values()])
    rows: list[Row] = []
    for (entry, measured), p_value in zip(results.items(), corrected, strict=True):
        regret = t_interval(measured[mean] - best_s).over(float(best_s.mean()))
        rows.append(
            {
                "entry": entry.name, "kind": entry.kind, "cell": cell, "seed": seed,
                "stream_count": len(best_s), "offered_load": load,
                **dict.fromkeys(SHOWN, math.nan),
                **{key: float(measured[key].mean()) for key in measured},
                "best_rule": " or ".join(dict.fromkeys(names)),
                "regret_mean_fraction": regret.estimate,
                "regret_mean_ci_low": regret.low, "regret_mean_ci_high": regret.high,
                "regret_mean_p_holm": p_value,
            }
        )  # fmt: skip
    rows.sort(key=lambda row: float(row[mean]))
    return [{**row, "rank": rank} for rank, row in enumerate(rows, 1)]


def board(rows: Sequence[Row]) -> list[Row]:
    """Sum up every entry over its cells: those in most cells first, then by mean regret."""
    of_entry: dict[str, list[Row]] = {}
    for row in rows:
        of_entry.setdefault(str(row["entry"]), []).append(row)
    summed = [_sum_up(entry_rows) for entry_rows in of_entry.values()]
    return sorted(summed, key=lambda row: (-int(row["cells"]), row["mean_regret_mean_fraction"]))


def _sum_up(rows: Sequence[Row]) -> Row:
    regrets = [float(row["regret_mean_fraction"]) for row in rows]
    worst = rows[int(np.argmax(regrets))]
    sure = [regret for row, regret in zip(rows, regrets, strict=True) if _is_sure(row)]
    return {
        "entry": rows[0]["entry"], "kind": rows[0]["kind"], "cell": ALL, "cells": len(rows),
        "mean_rank": float(np.mean([float(row["rank"]) for row in rows])),
        "mean_regret_mean_fraction": float(np.mean(regrets)),
        "worst_regret_mean_fraction": max(regrets),
        "worst_cell": worst["cell"],
        "cells_better": sum(regret < 0 for regret in sure),
        "cells_worse": sum(regret > 0 for regret in sure),
    }  # fmt: skip


def _is_sure(row: Row) -> bool:
    return float(row["regret_mean_p_holm"]) < SIGNIFICANT
