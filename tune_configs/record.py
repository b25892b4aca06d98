"""What a sweep leaves on its runs in MLflow: a note, metrics, tables and three figures.

The parent of a problem's trials has all of them. The parent of a chain has a note on every problem
and its metrics.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from matplotlib.figure import Figure
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from tokenyard.evaluation import SCORE as SCORE_KEY
from tokenyard.evaluation import level
from tokenyard.figures import draw_differences, draw_learning_curves, draw_trade_off
from tokenyard.problem import Measure, Row
from tokenyard.promotion import gain_over
from tokenyard.provenance import git_sha, versions
from tune_configs import mlflow_log
from tune_configs.experiment import SCORE
from tune_configs.sweep import Chain, FinishedTrial, Outcome, Report, Sweep


@dataclass(frozen=True)
class Finished:
    """A sweep that has a best trial."""

    sweep: Sweep
    trials: list[FinishedTrial]
    report: Report
    outcome: Outcome
    next_command: str
    """Serves what was registered."""

    @property
    def rule(self) -> str:
        """The best tuned rule where it was ranked too, else the experiment's baseline."""
        tuned = self.sweep.problem.best_tuned_rule(self.sweep.scenario)
        ranked = self.report.ranking.runs
        return tuned if tuned is not None and tuned in ranked else self.sweep.experiment.baseline

    @property
    def score(self) -> Measure:
        """The score, and its difference to the rule's."""
        heading = f"score, {self.sweep.problem.score.unit}"
        return Measure(SCORE_KEY, heading, delta="gain_score", more_is_better=True)

    @cached_property
    def rows(self) -> list[Row]:
        """The ranking's rows with the difference in score to the rule and its 95 % interval."""
        ranking, problem, scenario = self.report.ranking, self.sweep.problem, self.sweep.scenario
        rows = []
        for row in ranking.rows:
            both = ranking.runs[str(row["policy"])], ranking.runs[self.rule]
            gain = gain_over(problem, scenario, ranking.streams, *both)
            rows.append({**row, **dict(zip(self.score.delta_keys, gain, strict=True))})
        return rows

    @property
    def table(self) -> list[list[str]]:
        """Trials and rules, best first, as they are printed; the first line are headings."""
        sweep = self.sweep
        trials = {trial.label: trial for trial in self.trials}
        measures = sweep.problem.measures(sweep.scenario)
        shown = [measure for measure in measures if measure.key in sweep.problem.headline]
        spending = ("env steps", "checkpoint", "CPU s")
        heads = ("trial or rule", *spending, self.score.heading, f"against {self.rule}")
        lines = [[*heads, *(measure.heading for measure in shown)]]
        for row in self.rows:
            trial = trials.get(str(row["policy"]))
            spent = ("-", "-", "-")
            if trial is not None:
                chosen = f"{trial.checkpoint_env_steps:,}" if trial.learned else "start"
                spent = (f"{trial.env_steps:,}", chosen, f"{trial.cpu_s or 0:.0f}")
            gain = "{:+.3g} [{:+.3g}, {:+.3g}]".format(*(row[k] for k in self.score.delta_keys))
            numbers = f"{row[SCORE_KEY]:.4g}", "the rule" if row["policy"] == self.rule else gain
            levels = (level(row, measure) for measure in shown)
            lines.append([str(row["policy"]), *spent, *numbers, *levels])
        return lines

    @property
    def metrics(self) -> dict[str, float]:
        """What sweeps are compared by; docs/metrics.md defines the names."""
        rows = {str(row["policy"]): row for row in self.rows}
        best = rows[self.report.best.label]
        gain, low, high = (float(best[key]) for key in self.score.delta_keys)
        return {
            "eval/best_score": float(best[SCORE_KEY]),
            "eval/rule_score": float(rows[self.rule][SCORE_KEY]),
            "eval/gain": gain,
            "eval/gain_ci_low": low,
            "eval/gain_ci_high": high,
            "eval/trials_above_rule": sum(
                float(rows[trial.label]["gain_score"]) > 0 for trial in self.trials
            ),
            "system/wall_s": sum(trial.wall_s for trial in self.trials),
            "system/cpu_s": sum(trial.cpu_s or 0.0 for trial in self.trials),
        }

    @property
    def verdict(self) -> str:
        """Whether the best trial is champion, and why, in Markdown."""
        alias, _, reason = self.outcome.sentence.partition(": ")
        became = "is champion" if alias == "champion" else f"is a {alias} and not champion"
        return f"**`{self.report.best.label}` {became}**: {reason}."

    @property
    def note(self) -> str:
        """What was swept, the verdict, the outcome in a table, what to run next, in Markdown."""
        counts = Counter(str(trial.config["algorithm"]) for trial in self.trials)
        algorithms = ", ".join(f"{number} {name}" for name, number in counts.items())
        num_rules, streams = len(self.rows) - len(self.trials), self.report.ranking.streams
        head, *lines = self.table
        body = [[f"`{name}`", *cells] for name, *cells in lines]
        return "\n\n".join([
            f"{len(self.trials)} trials ({algorithms}) learned {self.sweep.problem.name} on "
            f"`{self.sweep.scenario.name}`. They are ranked beside {num_rules} rules on "
            f"{len(streams)} streams on which no checkpoint was chosen.",
            self.verdict,
            "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body]),
            f"Next: `{self.next_command}`",
        ])  # fmt: skip


def record(finished: Finished, command: str) -> None:
    """Put note, metrics, tables, figures, settings and provenance onto the sweep's run."""
    sweep, report, outcome = finished.sweep, finished.report, finished.outcome
    client, run_id = sweep.client, sweep.run_id
    tables = {"ranking": finished.rows, "evaluation": report.evaluation.rows}
    if outcome.verdict is not None:
        tables["verdict"] = outcome.verdict.rows
    for name, lines in tables.items():
        mlflow_log.log_table(client, run_id, lines, f"tables/{name}.json")
    note = finished.note
    for name, figure in draw_figures(finished).items():
        client.log_figure(run_id, figure, f"figures/{name}.png")
        note += f"\n\n![{name}](get-artifact?path=figures/{name}.png&run_uuid={run_id})"
    client.log_dict(run_id, _provenance(command, sweep.seed), "provenance.json")
    client.log_dict(run_id, _described(sweep), "experiment.json")
    tags = {"best_trial": report.best.label, "verdict": outcome.sentence, MLFLOW_RUN_NOTE: note}
    if report.passed_over:
        tags["passed_over"] = ", ".join(report.passed_over)
    mlflow_log.set_tags(client, run_id, tags | _registered(outcome))
    mlflow_log.log_metrics(client, run_id, finished.metrics)


def record_chain(chain: Chain, finished: Sequence[Finished], command: str) -> None:
    """Put note, verdict and metrics of each problem onto the parent run of a chain."""
    note = ["One sweep per problem:"]
    for result in finished:
        outcome, page = result.outcome, mlflow_log.run_page(chain.client, result.sweep.run_id)
        note.append(
            f"- [{outcome.problem} on {result.sweep.scenario.name}]({page}): {result.verdict}"
        )
        facts = {"verdict": outcome.sentence, **_registered(outcome)}
        tags = {f"{outcome.problem}.{key}": value for key, value in facts.items()}
        mlflow_log.set_tags(chain.client, chain.run_id, tags)
        named = {key.partition("/")[2]: value for key, value in result.metrics.items()}
        metrics = {f"{outcome.problem}/{name}": value for name, value in named.items()}
        mlflow_log.log_metrics(chain.client, chain.run_id, metrics)
    note += [
        f"Next: `{serve}`" for serve in dict.fromkeys(result.next_command for result in finished)
    ]
    mlflow_log.set_tags(chain.client, chain.run_id, {MLFLOW_RUN_NOTE: "\n\n".join(note)})
    chain.client.log_dict(chain.run_id, _provenance(command, chain.seed), "provenance.json")


def _registered(outcome: Outcome) -> dict[str, str]:
    return {f"registered_{key}": value for key, value in asdict(outcome.registration).items()}


def _provenance(command: str, seed: int) -> dict[str, Any]:
    return {"command": command, "git_sha": git_sha(), "versions": versions(), "seed": seed}


def draw_figures(finished: Finished) -> dict[str, Figure]:
    """Draw who beats the rule, how trials learned, and what they trade, by names of files."""
    problem, scenario = finished.sweep.problem, finished.sweep.scenario
    trials, credit = finished.trials, finished.report.ranking.streams.described
    kinds = {trial.label: str(trial.config["algorithm"]) for trial in trials}
    rows: list[Row] = [{**row, "baseline": finished.rule} for row in finished.rows]
    better = sum(float(row["gain_ci_low"]) > 0 for row in rows if row["policy"] in kinds)
    worse = sum(float(row["gain_ci_high"]) < 0 for row in rows if row["policy"] in kinds)
    title = f"{better} of {len(trials)} trials beat the rule, {worse} lose to it (95 % intervals)"
    figures = {
        "comparison": draw_differences(rows, finished.score, title, credit),
        "learning_curves": _draw_learning(finished, credit),
    }
    if problem.trade_off is not None:
        measures = {measure.key: measure for measure in problem.measures(scenario)}
        x, y = (measures[key] for key in problem.trade_off)
        figures["pareto"] = draw_trade_off(rows, x, y, kinds, credit)
    return figures


def _draw_learning(finished: Finished, credit: str) -> Figure:
    sweep = finished.sweep
    runs = mlflow_log.trial_runs(sweep.client, sweep.run_id)
    rule = finished.report.rule_scores[finished.rule]
    panels: dict[str, dict[str, list[list[tuple[float, float]]]]] = {}
    risen = above = 0
    for trial in finished.trials:
        panel = panels.setdefault(f"reward: {trial.config['reward_weights']}", {})
        run_id = runs[trial.trial_id].info.run_id
        curve = [
            (100 * steps / trial.config["env_steps"], score)
            for steps, score in mlflow_log.learning_curve(sweep.client, run_id, SCORE)
        ]
        panel.setdefault(str(trial.config["algorithm"]), []).append(curve)
        risen += curve[-1][1] > curve[0][1]
        above += curve[-1][1] > rule
    title = f"{risen} of {len(finished.trials)} trials improved, {above} ended above the rule"
    label = f"{finished.score.heading} (higher is better)"
    return draw_learning_curves(panels, label, (finished.rule, rule), title, credit)


def _described(sweep: Sweep) -> dict[str, Any]:
    """The experiment in plain values; what is code is given by its name."""
    experiment = sweep.experiment
    settings = {item.name: _plain(getattr(experiment, item.name)) for item in fields(experiment)}
    trials = experiment.designed_trials(sweep.seed)
    return {"reference": sweep.reference, **settings, "trials": trials}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "load_scenario"):
        return value.name
    try:
        json.dumps(value)
    except TypeError:
        return getattr(value, "__qualname__", str(value))
    return value
