"""The figures of a routing experiment, drawn from runs; each function returns one figure.

They follow the figures of Abbaraju: reward and violations per agent, response times, server loads,
violation heatmap, traffic. Violations are told apart by colour and by place or marker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tokenyard.figures import (
    COLOURS,
    ON_TIME,
    VIOLATION,
    bars,
    log_seconds,
    new_axes,
    new_figure,
    words,
)
from tokenyard.problem import Row
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.types import FloatArray

_NUM_TIME_BINS = 60
_NUM_FEATURED = 3


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
    pooled = [np.concatenate([run.outcomes.response_s for run in group]) for group in runs.values()]
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


def draw_loads(rows: Sequence[Row], labels: Mapping[str, str], load: float, goal: float) -> Figure:
    """Draw mean responses and attained SLOs over the load, one line per policy.

    `rows` are those of `load_sweep`; a dashed line is the load that was asked about.
    """
    figure = new_figure(3.6, "")
    mean, share = figure.subplots(1, 2)
    rate_per_s = load * float(rows[0]["rate_per_s"]) / float(rows[0]["offered_load"])
    for axes, key, factor, label in (
        (mean, "mean_response_s", 1.0, "mean response, s (log scale)"),
        (share, "slo_attainment_fraction", 100.0, "requests in their SLOs, %"),
    ):
        new_axes(axes, "requests a second", label)
        for (name, policy_label), colour in zip(labels.items(), COLOURS, strict=False):
            points = sorted((float(row["rate_per_s"]), factor * float(row[key])) for row in rows
                          if row["policy"] == name)  # fmt: skip
            axes.plot(
                *np.transpose(points), color=colour, linewidth=1.6, marker="o", markersize=2.5,
                label=policy_label,
            )  # fmt: skip
        axes.axvline(rate_per_s, color="black", linestyle="--", linewidth=0.8)
    mean.set_yscale("log")
    mean.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    mean.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    mean.yaxis.set_minor_formatter(NullFormatter())
    share.axhline(100 * goal, color=VIOLATION, linewidth=0.8)
    share.annotate(
        f"goal: {goal:.0%}", (0.02, 100 * goal), (0, -9), xycoords=("axes fraction", "data"),
        textcoords="offset points", color=VIOLATION, fontsize=8,
    )  # fmt: skip
    handles, names = mean.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=1, frameon=False, fontsize=8)
    return figure


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
    featured = {name: runs[name][0] for name in _featured(rows)}
    streams = [run.outcomes for run in next(iter(runs.values()))]
    context = np.concatenate([stream.context_tokens for stream in streams])
    total = np.concatenate([stream.total_tokens for stream in streams])
    rewards = {"reward_per_policy": reward_per_policy(rows, credit)} if "reward" in rows[0] else {}
    return {
        **rewards,
        "response_boxes": response_boxes(runs, slo_s, credit),
        "load_trajectories": load_trajectories(scenario, featured, credit),
        "response_per_request": response_per_request(featured, slo_s, credit),
        "violation_heatmap": violation_heatmap(scenario, featured, credit),
        "violations_per_policy": violations_per_policy(scenario, rows, credit),
        "token_histograms": token_histograms(context, total, credit),
        "request_counts": request_counts(streams[0].arrival_s, credit),
    }


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
