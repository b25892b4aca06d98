"""The figures of a routing experiment, drawn from runs; each function returns one figure.

They follow the figures of Abbaraju (learning curves, reward and violations per agent, response
times, server loads, violation heatmap, traffic). Violations are told apart by
its colour and by its place or marker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tokenyard.figures import (
    COLOURS,
    ON_TIME,
    VIOLATION,
    bars,
    colours,
    log_seconds,
    new_axes,
    new_figure,
    small_bars,
    words,
)
from tokenyard.problem import Row
from tokenyard.routing.fleet import TrafficClass
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.batching import BatchingOutcomes
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.types import FloatArray

_NUM_TIME_BINS = 60
_NUM_FEATURED = 3
_NUM_TAIL_POINTS = 400
_LEAST_SHARE = 1e-3


def reward_per_policy(rows: Sequence[Row], credit: str = "") -> Figure:
    """Draw cumulative reward per policy with its 95 % interval."""
    return bars(rows, "reward", 1.0, "cumulative reward per stream", credit)


def violations_per_policy(scenario: Scenario, rows: Sequence[Row], credit: str = "") -> Figure:
    """Draw the share of requests beyond the SLO per policy with its 95 % interval."""
    violated = server_model(scenario).violated(or_dropped=True)
    label = f"requests {violated}, % of those offered"
    return bars(rows, "slo_violation_fraction", 100.0, label, credit)


def response_boxes(runs: Mapping[str, Sequence[Run]], slo_s: float, credit: str = "") -> Figure:
    """Draw response times per policy, all streams together; whiskers from 1 % to 99 %."""
    figure = new_figure(0.9 + 0.34 * len(runs), credit)
    axes = new_axes(figure.subplots(), "response time, s (log scale)", "")
    pooled = [np.concatenate([run.outcomes.response_s for run in some]) for some in runs.values()]
    axes.boxplot(
        [response_s[~np.isnan(response_s)] for response_s in pooled],
        orientation="horizontal",
        tick_labels=[words(name) for name in runs],
        whis=(1, 99),
        showfliers=False,
        widths=0.6,
        patch_artist=True,
        boxprops={"facecolor": "#CFE3F1", "edgecolor": ON_TIME},
        medianprops={"color": "black", "linewidth": 1.4},
    )
    log_seconds(axes)
    axes.axvline(slo_s, color=VIOLATION, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"SLO {slo_s:g} s", (slo_s, 1.0), (3, 2), xycoords=("data", "axes fraction"),
        textcoords="offset points", color=VIOLATION, fontsize=8, annotation_clip=False,
    )  # fmt: skip
    axes.invert_yaxis()
    return figure


def token_latencies(
    scenario: Scenario, runs: Mapping[str, Sequence[Run]], credit: str = ""
) -> Figure:
    """Draw the distributions of TTFT, TPOT and inter-token latency, all streams together.

    A curve is the share of requests (of gaps between tokens) that took longer, so that the tail
    can be read; level lines are the SLOs of classes.
    """
    figure = new_figure(3.4 + 0.16 * math.ceil(len(runs) / 4), credit)
    panels = figure.subplots(1, 3, sharey=True)
    titles = ("time to first token, s", "time per output token, s", "gap between tokens, s")
    for axes, title in zip(panels, titles, strict=True):
        new_axes(axes, title, "")
        axes.set_yscale("log")
    for (name, some), colour, style in zip(runs.items(), colours(), _styles(), strict=False):
        outcomes = [BatchingOutcomes.of(one.outcomes) for one in some]
        for axes, (times_s, share) in zip(panels, _tails(outcomes), strict=True):
            axes.plot(times_s, share, style, color=colour, linewidth=1.2, label=words(name))
    for axes, slo in zip(panels, ("ttft_s", "tpot_s"), strict=False):
        _mark_slos(axes, scenario.required_fleet.classes, slo)
    panels[0].set_ylim(_LEAST_SHARE, 1.05)
    for axes in panels:
        log_seconds(axes)
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
    panels[0].set_ylabel("longer than that", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles[: len(runs)], labels[: len(runs)], loc="outside upper center", ncols=4,
        frameon=False, fontsize=8,
    )  # fmt: skip
    return figure


def memory_and_energy(rows: Sequence[Row], credit: str = "") -> Figure:
    """Draw KV memory in use, prefix hits, preemptions, wasted tokens and energy per policy."""
    panels = {
        "kv_used_fraction": ("KV memory\nheld, %", 100.0),
        "prefix_hit_fraction": ("prefix\nhits, %", 100.0),
        "preemptions_per_request": ("preemptions per\n100 requests", 100.0),
        "wasted_tokens_fraction": ("tokens\nwasted, %", 100.0),
        "energy_j_per_token": ("joules per\noutput token", 1.0),
    }
    return small_bars(rows, panels, credit)


def attainment(scenario: Scenario, rows: Sequence[Row], credit: str = "") -> Figure:
    """Draw the share of requests that attained their SLOs, by class and by tenant."""
    fleet = scenario.required_fleet
    panels = {
        f"attained_{service_class.name}_fraction": (f"class\n{service_class.name}, %", 100.0)
        for service_class in fleet.classes
    }
    if len(fleet.tenants) > 1:
        for tenant in fleet.tenants:
            key = f"attained_tenant_{tenant.name}_fraction"
            panels[key] = (f"tenant\n{tenant.name}, %", 100.0)
        panels["service_gap_tokens_per_s"] = ("service gap\ntokens/s", 1.0)
    return small_bars(rows, panels, credit, "requests that attained their SLOs")


def load_trajectories(scenario: Scenario, runs: Mapping[str, Run], credit: str = "") -> Figure:
    """Draw the tokens waiting or running at every server over time, one panel per policy.

    A request counts with all its tokens from its arrival to its completion.
    """
    figure = new_figure(0.8 + 1.7 * len(runs), credit)
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        new_axes(axes, "", "thousand tokens")
        axes.set_title(words(name), fontsize=9, loc="left")
        for index, server in enumerate(_server_labels(scenario)):
            time_s, tokens = _load_over_time(run, index)
            axes.step(
                time_s / 60, tokens / 1000, where="post", color=COLOURS[index % len(COLOURS)],
                linewidth=0.8, label=server,
            )  # fmt: skip
    panels[0].set_ylim(bottom=0)
    panels[-1].set_xlabel("time, min", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    return figure


def response_per_request(runs: Mapping[str, Run], slo_s: float, credit: str = "") -> Figure:
    """Draw every request's response time in order of arrival, one panel per policy."""
    figure = new_figure(0.8 + 1.7 * len(runs), credit)
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        new_axes(axes, "", "response, s")
        response_s = run.outcomes.response_s
        request = np.arange(len(response_s))
        for which, colour in ((response_s <= slo_s, ON_TIME), (response_s > slo_s, VIOLATION)):
            axes.scatter(request[which], response_s[which], s=2, color=colour, linewidths=0)
        axes.axhline(slo_s, color="black", linestyle="--", linewidth=0.8)
        violated = 100 * np.mean(~(response_s <= slo_s))
        axes.set_title(
            f"{words(name)}: {violated:.1f} % beyond {slo_s:g} s", fontsize=9, loc="left"
        )
    panels[0].set_ylim(bottom=0)
    panels[-1].set_xlabel("request, in order of arrival", fontsize=9)
    return figure


def violation_heatmap(scenario: Scenario, runs: Mapping[str, Run], credit: str = "") -> Figure:
    """Draw the share of SLO violations per server over time, one panel per policy.

    White is a stretch in which the server was sent nothing.
    """
    figure = new_figure(0.9 + 0.32 * scenario.num_servers * len(runs) + 0.25 * len(runs), credit)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        edges, share = _violation_share(scenario, run)
        image = axes.pcolormesh(
            edges / 60, np.arange(scenario.num_servers + 1), 100 * share,
            cmap="cividis", vmin=0, vmax=100,
        )  # fmt: skip
        labels = _server_labels(scenario)
        axes.set_yticks(np.arange(scenario.num_servers) + 0.5, labels, fontsize=8)
        axes.set_title(words(name), fontsize=9, loc="left")
        axes.tick_params(length=0, labelsize=8)
        axes.invert_yaxis()
    panels[-1].set_xlabel("time of arrival, min", fontsize=9)
    bar = figure.colorbar(image, ax=panels.tolist(), pad=0.01)
    bar.set_label(f"{server_model(scenario).violated()}, %", fontsize=9)
    return figure


def token_histograms(context: FloatArray, total: FloatArray, credit: str = "") -> Figure:
    """Draw how long requests are: context, generated and total tokens.

    The longest half per cent lies beyond the axes, which would be empty otherwise; titles name
    the longest request.
    """
    figure = new_figure(2.6, credit)
    panels = figure.subplots(1, 3)
    named = {"context": context, "generated": total - context, "total": total}
    for axes, (name, tokens), colour in zip(panels, named.items(), COLOURS, strict=False):
        new_axes(axes, f"{name} tokens", "")
        weights = np.full(len(tokens), 100 / len(tokens))
        longest_shown = max(float(np.percentile(tokens, 99.5)), 1.0)
        axes.hist(tokens, bins=50, range=(0, longest_shown), weights=weights, color=colour)
        axes.axvline(tokens.mean(), color="black", linestyle="--", linewidth=1)
        axes.set_title(f"mean {tokens.mean():,.0f}, longest {tokens.max():,.0f}", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    panels[0].set_ylabel("requests, %", fontsize=9)
    return figure


def request_counts(arrival_s: FloatArray, credit: str = "") -> Figure:
    """Draw how many requests arrive over one stream, in even stretches of time."""
    edges = _time_edges(arrival_s)
    width_s = edges[1] - edges[0]
    figure = new_figure(2.6, credit)
    axes = new_axes(figure.subplots(), "time, min", f"requests per {width_s:.0f} s")
    counts, _ = np.histogram(arrival_s, edges)
    axes.stairs(counts, edges / 60, color=ON_TIME, fill=True, alpha=0.35)
    axes.stairs(counts, edges / 60, color=ON_TIME, linewidth=1.2)
    axes.set_xlim(0, edges[-1] / 60)
    return figure


def draw_evaluation(
    scenario: Scenario, runs: Mapping[str, Sequence[Run]], rows: Sequence[Row], credit: str
) -> dict[str, Figure]:
    """Draw every figure of one evaluation, by the name of its file.

    Figures of one stream show the first; those that need a panel per policy show at most three:
    the first that was named, the one in the middle of the order of mean response, and the best.
    """
    slo_s = scenario.slo_response_s
    some = {name: runs[name][0] for name in _featured(rows)}
    streams = [run.outcomes for run in next(iter(runs.values()))]
    context = np.concatenate([stream.context_tokens for stream in streams])
    total = np.concatenate([stream.total_tokens for stream in streams])
    rewards = {"reward_per_policy": reward_per_policy(rows, credit)} if "reward" in rows[0] else {}
    drawn = {
        **rewards,
        "response_boxes": response_boxes(runs, slo_s, credit),
        "load_trajectories": load_trajectories(scenario, some, credit),
        "response_per_request": response_per_request(some, slo_s, credit),
        "violation_heatmap": violation_heatmap(scenario, some, credit),
        "violations_per_policy": violations_per_policy(scenario, rows, credit),
        "token_histograms": token_histograms(context, total, credit),
        "request_counts": request_counts(streams[0].arrival_s, credit),
    }
    further = {
        "token_latencies": lambda: token_latencies(scenario, runs, credit),
        "memory_and_energy": lambda: memory_and_energy(rows, credit),
        "attainment": lambda: attainment(scenario, rows, credit),
    }
    return drawn | {name: further[name]() for name in server_model(scenario).figures}


def _tails(outcomes: Sequence[BatchingOutcomes]) -> list[tuple[FloatArray, FloatArray]]:
    """TTFT, TPOT and inter-token latencies: times and the share that is longer, of each."""
    ttft_s = np.concatenate([outcome.first_token_s for outcome in outcomes])
    tpot_s = np.concatenate([outcome.tpot_s for outcome in outcomes])
    counts = np.sum([outcome.latency_counts for outcome in outcomes], axis=0)
    edges_s = lay.LATENCY_BIN_START_S * np.exp(np.arange(len(counts) + 1) / lay.LATENCY_BINS_PER_E)
    up_to = np.concatenate([[0.0], np.cumsum(counts)])
    filled = np.flatnonzero(counts)
    shown = slice(filled[0], filled[-1] + 1) if len(filled) else slice(0)
    longer = 1.0 - up_to[shown] / max(up_to[-1], 1.0)
    return [_tail(ttft_s), _tail(tpot_s), (edges_s[shown], longer)]


def _tail(times_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sorted times, thinned out where they are many, and the share that is longer than each.

    Empty where no time is known, as that per output token of answers of one.
    """
    known = np.sort(times_s[~np.isnan(times_s)])
    if not len(known):
        return known, known
    share = 1.0 - np.arange(len(known)) / len(known)
    # Even steps in the share's logarithm: no more points than can be told apart.
    steps = np.geomspace(1.0, 1.0 / len(known), _NUM_TAIL_POINTS)
    which = np.unique(np.searchsorted(-share, -steps, side="left").clip(max=len(known) - 1))
    return known[which], share[which]


def _mark_slos(axes: Axes, classes: Sequence[TrafficClass], slo: str) -> None:
    """Mark the SLOs of classes; equal ones share a line."""
    named: dict[float, list[str]] = {}
    for service_class in classes:
        value = getattr(service_class, slo)
        if value is not None:
            named.setdefault(value, []).append(service_class.name)
    for value_s, names in named.items():
        axes.axvline(value_s, color=VIOLATION, linestyle="--", linewidth=1.0)
        axes.annotate(
            ", ".join(names), (value_s, 0.02), (-3, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=VIOLATION, fontsize=7, rotation=90, ha="right",
        )  # fmt: skip


def _featured(rows: Sequence[Row]) -> list[str]:
    order = sorted(rows, key=lambda row: float(row["mean_response_s"]))
    names = [rows[0], order[len(order) // 2], order[0]]
    return list(dict.fromkeys(str(row["policy"]) for row in names))[:_NUM_FEATURED]


def _load_over_time(run: Run, server: int) -> tuple[FloatArray, FloatArray]:
    """Times at which the tokens in flight at a server change, and the tokens from then on."""
    outcomes = run.outcomes
    mine = (outcomes.server == server) & ~np.isnan(outcomes.response_s)
    tokens, arrival_s = outcomes.total_tokens[mine], outcomes.arrival_s[mine]
    time_s = np.concatenate([[0.0], arrival_s, arrival_s + outcomes.response_s[mine]])
    order = np.argsort(time_s, kind="stable")
    return time_s[order], np.cumsum(np.concatenate([[0.0], tokens, -tokens])[order])


def _violation_share(scenario: Scenario, run: Run) -> tuple[FloatArray, FloatArray]:
    """Edges of even stretches of time, and the share of SLO violations per server in each."""
    outcomes = run.outcomes
    edges = _time_edges(outcomes.arrival_s)
    violated = outcomes.violations(scenario.slo_response_s)
    share = np.empty((scenario.num_servers, len(edges) - 1))
    for server in range(scenario.num_servers):
        mine = outcomes.server == server
        sent, _ = np.histogram(outcomes.arrival_s[mine], edges)
        violations, _ = np.histogram(outcomes.arrival_s[mine & violated], edges)
        share[server] = np.where(sent > 0, violations / np.maximum(sent, 1), math.nan)
    return edges, share


def _time_edges(arrival_s: FloatArray) -> FloatArray:
    return np.linspace(0.0, max(float(arrival_s[-1]), 1e-9), _NUM_TIME_BINS + 1)


def _server_labels(scenario: Scenario) -> list[str]:
    speeds = scenario.server_capacities_tokens_per_s
    named = zip(scenario.server_names, speeds, strict=True)
    return [f"{name} ({tokens_per_s:,.0f} tokens/s)" for name, tokens_per_s in named]


def _styles() -> Iterable[str]:
    return [style for style in ("-", "--", ":", "-.") * 9 for _ in COLOURS]
