"""The progress of a sweep: one live table on a terminal, else a line per trial that ends."""

from __future__ import annotations

from ray.tune import ProgressReporter
from ray.tune.experiment import Trial
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tune_configs.experiment import ENV_STEPS, SCORE

_STATES = {Trial.RUNNING: "running", Trial.TERMINATED: "done", Trial.ERROR: "failed"}
_COLUMNS = ("trial", "state", "env steps", "score now", "score at the start", "elapsed")


class Progress(ProgressReporter):
    """Shows the trials of one problem on stderr while Tune runs them."""

    def __init__(self, title: str, num_trials: int) -> None:
        """Show nothing yet: Tune pickles it before it runs, and knows of some trials later."""
        self._title, self._num_trials = title, num_trials
        self._first_scores: dict[str, float] = {}
        self._ended: set[str] = set()
        self._live: Live | None = None

    def should_report(self, trials: list[Trial], done: bool = False) -> bool:
        """Always: Tune asks a few times a second."""
        return True

    def report(self, trials: list[Trial], done: bool, *sys_info: str) -> None:
        """Draw the table anew, or name the trials that have ended since the last time."""
        for trial in trials:
            if SCORE in trial.last_result:
                self._first_scores.setdefault(trial.trial_id, trial.last_result[SCORE])
        console = Console(stderr=True)
        if console.is_terminal:
            self._draw(trials, done, console)
            return
        for trial in trials:
            if trial.is_finished() and trial.trial_id not in self._ended:
                self._ended.add(trial.trial_id)
                name, state, *cells = self._cells(trial)
                facts = ", ".join(map(" ".join, zip(_COLUMNS[2:], cells, strict=True)))
                line = f"{len(self._ended)} of {self._num_trials} {state}: {name}: {facts}"
                console.print(line, soft_wrap=True, highlight=False)

    def _draw(self, trials: list[Trial], done: bool, console: Console) -> None:
        ended = sum(trial.is_finished() for trial in trials)
        table = Table(title=f"{self._title}: {ended} of {self._num_trials} trials have ended")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in _COLUMNS[:2] else "right")
        # Where the terminal is too low, the last ones are cut off.
        for trial in sorted(
            trials, key=lambda trial: (trial.status != Trial.RUNNING, -_steps(trial))
        ):
            table.add_row(*self._cells(trial))
        if self._live is None:
            self._live = Live(console=console)
            self._live.start()
            # A sweep that breaks off would leave the terminal without it.
            console.show_cursor()
        self._live.update(table)
        if done:
            self._live.stop()
            self._live = None

    def _cells(self, trial: Trial) -> list[str]:
        result = trial.last_result
        first, now = self._first_scores.get(trial.trial_id), result.get(SCORE)
        return [
            str(trial),
            _STATES.get(trial.status, "waiting"),
            f"{_steps(trial):,} of {trial.config['env_steps']:,}",
            "-" if now is None else f"{now:.4g}",
            "-" if first is None else f"{first:.4g}",
            f"{result.get('time_total_s', 0.0):.0f} s",
        ]


def _steps(trial: Trial) -> int:
    return int(trial.last_result.get(ENV_STEPS, 0))
