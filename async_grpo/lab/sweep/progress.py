"""SweepView: the progress of a sweep, as a live table in a terminal and as an occasional line elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from async_grpo.app.report.live_view import LiveFrame, format_duration, make_progress_bar


@dataclass(frozen=True, slots=True)
class RunningPoint:
    """A run in progress."""

    label: str
    step: int
    """Newest trained step."""
    steps: int
    start_step: int
    """Newest trained step when this run was started; above 0 if it was resumed."""
    elapsed_s: float
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class SweepState:
    """The state of a sweep: counts of points, the runs in progress, and their pace."""

    total: int
    finished: int
    failed: int
    running: Sequence[RunningPoint]
    steps_left: int
    """Steps left over all points, including the running ones."""
    at_once: int
    ended_steps: int = 0
    """Steps that the ended runs of this invocation trained."""
    ended_s: float = 0.0
    """Seconds that these runs took, starts included."""
    elapsed_s: float = 0.0
    stopping: bool = False


def eta_s(state: SweepState) -> float | None:
    """Return the seconds for the remaining steps at the mean pace of this invocation's runs, starts included.

    None before the first step and after the last.

    >>> eta_s(SweepState(4, 1, 0, [], steps_left=30, at_once=2, ended_steps=10, ended_s=20.0))
    30.0
    """
    # A run that is still starting has no pace yet. Counting its seconds would double the estimate at each start.
    training = [run for run in state.running if run.step > run.start_step]
    steps = state.ended_steps + sum(run.step - run.start_step for run in training)
    seconds = state.ended_s + sum(run.elapsed_s for run in training)
    if steps <= 0 or not state.steps_left:
        return None
    return state.steps_left * seconds / steps / state.at_once


def format_line(state: SweepState) -> str:
    """Return the state as one line for a log."""
    running = [f"{run.label} at step {run.step}/{run.steps}" for run in state.running]
    return " | ".join([f"[{format_duration(state.elapsed_s)}] {_format_counts(state)}", *running])


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
            self.print_message(format_line(state))

    def render(self) -> RenderableType:
        """Return the table of the newest state."""
        return "" if self._state is None else progress_table(self._state)


def progress_table(state: SweepState) -> Table:
    """Return the state as a table: a row for the sweep and one per run in progress."""
    rows = Table.grid(padding=(0, 2))
    ended = state.finished + state.failed
    counts = Text(_format_counts(state), style="bold")
    rows.add_row(Text("points", style="bold"), make_progress_bar(ended, state.total), counts)
    for run in state.running:
        status = "starting"
        if run.step:
            reward = "" if run.reward is None else f", reward {run.reward:.3f}"
            status = f"step {run.step} of {run.steps}{reward}, {format_duration(run.elapsed_s)}"
        rows.add_row(Text(run.label, style="cyan"), make_progress_bar(run.step, run.steps), Text(status))
    return rows


def _format_counts(state: SweepState) -> str:
    text = f"{state.finished} of {state.total} points finished"
    if state.failed:
        text += f", {state.failed} failed"
    if state.stopping:
        return f"{text}, stopping (Ctrl-C again: immediately)"
    left_s = eta_s(state)
    return text if left_s is None else f"{text}, {format_duration(left_s)} left"
