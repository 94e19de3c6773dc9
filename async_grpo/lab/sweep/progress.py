"""SweepView: the progress of a sweep, as a live table in a terminal and as an occasional line anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from async_grpo.app.report.live_view import LiveFrame, clock, progress_bar


@dataclass(frozen=True, slots=True)
class RunningPoint:
    """A run in progress. `step` is the newest trained step, `begun_at` its newest step when it was started."""

    label: str
    step: int
    steps: int
    begun_at: int
    elapsed_s: float
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class SweepState:
    """The state of a sweep: counts of points, the runs that are going on, and their pace."""

    total: int
    finished: int
    failed: int
    running: Sequence[RunningPoint]
    steps_left: int
    """Steps left over all points, the running ones included."""
    at_once: int
    made_steps: int = 0
    """Steps that the ended runs of this invocation made in `spent_s` seconds, starts included."""
    spent_s: float = 0.0
    elapsed_s: float = 0.0
    stopping: bool = False


def eta_s(state: SweepState) -> float | None:
    """Seconds for the steps left at the mean pace of this invocation's runs, their starts included.

    None before the first step and after the last.

    >>> eta_s(SweepState(4, 1, 0, [], steps_left=30, at_once=2, made_steps=10, spent_s=20.0))
    30.0
    """
    at_work = [run for run in state.running if run.step > run.begun_at]
    made = state.made_steps + sum(run.step - run.begun_at for run in at_work)
    spent_s = state.spent_s + sum(run.elapsed_s for run in at_work)
    return state.steps_left * spent_s / made / state.at_once if made > 0 and state.steps_left else None


def line(state: SweepState) -> str:
    """The state in one line, for a log."""
    running = [f"{run.label} at step {run.step}/{run.steps}" for run in state.running]
    return " | ".join([f"[{clock(state.elapsed_s)}] {_counts(state)}", *running])


class SweepView(LiveFrame):
    """Shows the newest `SweepState`."""

    def __init__(self, console: Console, every_s: float = 30.0) -> None:
        super().__init__(console, every_s)
        self._printed_s = 0.0  # the plan is printed at the start, the first line only after `every_s`
        self._state: SweepState | None = None

    def update(self, state: SweepState) -> None:
        """Show `state`; without a terminal, print a line if the last one is `every_s` old."""
        self._state = state
        if self._is_line_due(state.elapsed_s):
            self._printed_s = state.elapsed_s
            self.say(line(state))

    def render(self) -> RenderableType:
        """The table of the newest state."""
        return "" if self._state is None else table(self._state)


def table(state: SweepState) -> Table:
    """The state as a table: a row for the sweep and one for every run in progress."""
    rows = Table.grid(padding=(0, 2))
    done = state.finished + state.failed
    rows.add_row(Text("points", style="bold"), progress_bar(done, state.total), Text(_counts(state), style="bold"))
    for run in state.running:
        reward = "" if run.reward is None else f", reward {run.reward:.3f}"
        at = f"step {run.step} of {run.steps}{reward}, {clock(run.elapsed_s)}" if run.step else "starting"
        rows.add_row(Text(run.label, style="cyan"), progress_bar(run.step, run.steps), Text(at))
    return rows


def _counts(state: SweepState) -> str:
    failed = f", {state.failed} failed" if state.failed else ""
    left_s = eta_s(state)
    left = "" if left_s is None else f", {clock(left_s)} left"
    if state.stopping:
        left = ", stopping (Ctrl-C again: at once)"
    return f"{state.finished} of {state.total} points finished{failed}{left}"
