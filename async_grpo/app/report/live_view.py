"""LiveView: the progress of a run, as a live panel in a terminal and as lines anywhere else.

    terminal    a panel as wide as the terminal
    a file      a line for every step, but at most one a second; another when a role begins the next part of its start
                and when an evaluation begins or ends; and one every ten seconds in any case

    with LiveView(config, console) as view:
        view.phase("preparing the model")
        view.update(state)
        view.say("rollout-0 was killed; restart 1 of 3")

Its owner calls `update` as often as it likes; rich redraws from another thread. `LiveFrame` is what this view shares
with that of a sweep, and `panel` and `line` turn a `LiveState` into what is shown.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, Self

from msgspec import to_builtins
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from async_grpo.app.report.live_state import LiveState, RoleState, who_waits
from async_grpo.app.report.summary import held_out_score, score_format
from async_grpo.config.schema import RunConfig
from async_grpo.telemetry.bottleneck import describe_evaluation
from async_grpo.telemetry.logging import is_json, log_as
from async_grpo.telemetry.rows import Row, mean, number, seconds_by_part, tokens_per_s
from async_grpo.utils.text import figure, sparkline

_RECENT_STEPS = 20
_LEAST_LINE_S = 1.0
_BAR_CELLS = 24
_MOST_LINES = 5
_GOOD, _BAD, _DIM, _KEY = "green", "red", "bright_black", "cyan"
_STATE_STYLES = {"running": _GOOD, "finished": _GOOD, "failed": _BAD, "starting": "yellow", "restarting": "yellow"}


class LiveFrame(ABC):
    """A live display in a terminal; without one, lines at least `every_s` seconds apart."""

    def __init__(self, console: Console, every_s: float) -> None:
        self._console = console
        self._every_s = every_s
        self._printed_s: float | None = None

    def __enter__(self) -> Self:
        self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""
        self._live.stop()

    @abstractmethod
    def render(self) -> RenderableType:
        """Draw what the terminal shows now. rich calls it from a thread of its own."""

    def say(self, text: str) -> None:
        """Print a line above the live display; it stays."""
        self._write("info", text, {})

    def warn(self, text: str, *, level: Literal["warning", "error"] = "warning", **fields: object) -> None:
        """Like `say`, for a problem; see `Warn`."""
        self._write(level, text, fields)

    def _write(self, level: Literal["info", "warning", "error"], text: str, fields: Mapping[str, object]) -> None:
        if is_json() and not self._console.is_terminal:
            log_as("supervisor", level, text, fields)
            return
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _is_line_due(self, elapsed_s: float) -> bool:
        """Whether a line has to be printed for a state of that time."""
        waited = self._printed_s is None or elapsed_s - self._printed_s >= self._every_s
        return waited and not self._console.is_terminal


class LiveView(LiveFrame):
    """Shows the newest `LiveState` of a run."""

    def __init__(self, config: RunConfig, console: Console, every_s: float = 10.0) -> None:
        super().__init__(console, every_s)
        self._config = config
        self._lock = threading.Lock()
        self._phase = ""
        self._phase_began_s = 0.0
        self._spinner = Spinner("dots")
        self._phase_step: float | None = None
        self._last_step: float | None = None
        self._state: LiveState | None = None
        self._printed: LiveState | None = None
        self._rewards: dict[int, float] = {}
        self._step_s: dict[int, float] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen, or print it as the last line."""
        self.phase("")
        super().__exit__(kind, error, trace)
        self.print_last_state()

    def print_last_state(self) -> None:
        """Without a terminal, print the newest state if no line has shown it. The report's lines come after it."""
        if not self._console.is_terminal and self._state is not None and self._state is not self._printed:
            self._print_line(self._state)

    def phase(self, text: str) -> None:
        """Show what happens outside the steps (preparing, starting, stopping), until "" or the next step ends it."""
        with self._lock:
            self._phase, self._phase_began_s = text, time.monotonic()
            self._phase_step = self._last_step
        if text and not self._console.is_terminal:
            self.say(text)

    def update(self, state: LiveState) -> None:
        """Show `state`; without a terminal, print a line if there is news or the last one is `every_s` old."""
        with self._lock:
            self._remember(state)
            self._state = state
        if self._is_line_due(state.elapsed_s) or self._is_news(state):
            self._print_line(state)

    def render(self) -> RenderableType:
        """The panel of the newest state, or the phase before the first one."""
        with self._lock:
            phase = self._shown_phase()
            if self._state is None:
                return phase
            rewards = [self._rewards[step] for step in sorted(self._rewards)]
            eta_s, cells = self._eta_s(self._state), min(max((self._console.width - 56) // 2, 12), 72)
            return panel(self._config, self._state, rewards, eta_s, phase, cells)

    def _shown_phase(self) -> RenderableType:
        """The phase with its seconds so far, so that something moves while a model is loaded."""
        if not self._phase:
            return ""
        spent_s = time.monotonic() - self._phase_began_s
        self._spinner.update(text=Text(f"{self._phase}   {clock(spent_s)}", style="bold"))
        return self._spinner

    def _is_news(self, state: LiveState) -> bool:
        """Whether a step was trained, a role came further in its start, or an evaluation began or ended, since the last
        line."""
        last = self._printed
        if last is None or self._console.is_terminal or state.elapsed_s - last.elapsed_s < _LEAST_LINE_S:
            return False
        return (last.step or {}).get("step") != (state.step or {}).get("step") or _stages(last) != _stages(state)

    def _remember(self, state: LiveState) -> None:
        """Rewards and durations by step, so that a state shown twice counts once; a new step ends the phase."""
        row = state.step or {}
        step = self._last_step = number(row, "step")
        if step is None:
            return
        if step != self._phase_step:
            self._phase = ""
        for history, key in ((self._rewards, "reward_mean"), (self._step_s, "step_s")):
            if (value := number(row, key)) is not None:
                history[int(step)] = value

    def _eta_s(self, state: LiveState) -> float | None:
        """Steps left times the mean of the recent step times; None if no step is left, or while no step can end because
        the trainer or every server is away: the time would stand still, and be wrong."""
        step_s = mean([self._step_s[step] for step in sorted(self._step_s)[-_RECENT_STEPS:]])
        left = self._config.steps - state.steps_done
        if step_s is None or left <= 0 or _is_halted(state):
            return None
        return left * step_s

    def _print_line(self, state: LiveState) -> None:
        self._printed, self._printed_s = state, state.elapsed_s
        eta_s = self._eta_s(state)
        self._write("info", line(self._config, state, eta_s), progress_fields(self._config, state, eta_s))


def _is_halted(state: LiveState) -> bool:
    """True while the trainer is not running, or no server reports."""
    trainers = [role for role in state.roles if role.name == "trainer"]
    return not state.servers or any(role.state != "running" for role in trainers)


def _stages(state: LiveState) -> tuple[list[tuple[str, str]], list[bool]]:
    starts = [(role.state, role.stage) for role in state.roles]
    return starts, [server.evaluation is not None for server in state.servers]


def panel(
    config: RunConfig,
    state: LiveState,
    rewards: Sequence[float],
    eta_s: float | None,
    phase: RenderableType,
    cells: int = _BAR_CELLS,
) -> Panel:
    """The state as a panel. `rewards` is the history so far; `phase` stands above everything ("" for none); `cells` is
    the width of the bars and of the rewards' history."""
    table = _facts(config, state, rewards, eta_s, cells)
    settings = f"S={config.max_staleness}  P={config.groups_per_step}  G={config.group_size}"
    return Panel(
        Group(phase, table) if phase else table,
        title=Text(config.name, style="bold"),
        title_align="left",
        subtitle=Text(f"{settings}   {clock(state.elapsed_s)}", style=_DIM),
        subtitle_align="right",
        border_style=_DIM,
        padding=(0, 1),
    )


def _facts(
    config: RunConfig, state: LiveState, rewards: Sequence[float], eta_s: float | None, cells: int
) -> RenderableType:
    row, left = state.step or {}, "" if eta_s is None else f"   {clock(eta_s)} left"
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_KEY, no_wrap=True)
    table.add_column(overflow="fold")
    steps = progress_bar(state.steps_done, config.steps, _GOOD, cells)
    table.add_row("steps", _beside(steps, f"{state.steps_done} of {config.steps}{left}"))
    table.add_row("reward", _reward(row, rewards, cells))
    table.add_row(_score(state), Text(_accuracy(state)))
    for server in state.servers:
        if doing := describe_evaluation(server):
            table.add_row("", Text(f"{server.name} {doing}", style="yellow"))
    table.add_row("staleness", _staleness(row, config.max_staleness))
    groups = f"{state.active}/{state.capacity}   {state.inflight} in flight, {state.ready} ready, {state.taken} taken"
    held = progress_bar(state.active, state.capacity, "blue", cells)
    table.add_row("buffer", _beside(held, f"{groups}, {state.waiting} tasks left"))
    table.add_row("speed", Text(_speed(state)))
    table.add_row("log-prob gap", Text(_gap(row)))
    table.add_row("last step", Text(_time(row)))
    table.add_row("who waits", Text(who_waits(state, config.groups_per_step), style="bold"))
    table.add_row("roles", _roles(state))
    return table


def line(config: RunConfig, state: LiveState, eta_s: float | None) -> str:
    """The state in one line, for a log; before the first step, what the run waits for."""
    if state.step is None:
        step = f"[{clock(state.elapsed_s)}] step {state.steps_done}/{config.steps}"
        return f"{step} | {who_waits(state, config.groups_per_step)}"
    row = state.step
    parts = [
        f"[{clock(state.elapsed_s)}] step {state.steps_done}/{config.steps}",
        f"reward {_figure(row, 'reward_mean', '.3f')}",
        f"{_score(state)} {_accuracy(state)}",
        f"age {_figure(row, 'age_max', '.0f')}/{config.max_staleness}",
        f"buffer {state.active}/{state.capacity}",
        _speed(state),
        f"gap {_figure(row, 'logprob_gap_mean', '.1e')}",
        who_waits(state, config.groups_per_step),
    ]
    return " | ".join(parts if eta_s is None else [*parts, f"{clock(eta_s)} left"])


def progress_fields(config: RunConfig, state: LiveState, eta_s: float | None) -> dict[str, object]:
    """The numbers of `line`, for programs that read the log; those that are not known yet are left out."""
    row = state.step or {}
    fields: dict[str, object] = {
        "kind": "progress",
        "step": state.steps_done,
        "steps": config.steps,
        "reward_mean": number(row, "reward_mean"),
        "age_max": number(row, "age_max"),
        "age_bound": config.replay_policy.age_bound,
        "active": state.active,
        "capacity": state.capacity,
        "servers": len(state.servers),
        "generated_tokens_per_s": sum(server.tokens_per_s for server in state.servers),
        "trained_tokens_per_s": tokens_per_s([row]),
        "logprob_gap_mean": number(row, "logprob_gap_mean"),
        "elapsed_s": round(state.elapsed_s, 1),
        "eta_s": eta_s,
        "waits": who_waits(state, config.groups_per_step),
    }
    return {name: value for name, value in fields.items() if value is not None}


def clock(seconds: float) -> str:
    """125 -> "2:05"; 3725 -> "1:02:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress_bar(value: int, total: int, style: str = _GOOD, cells: int = _BAR_CELLS) -> ProgressBar:
    """A bar of the share `value` / `total`, `cells` characters wide."""
    return ProgressBar(max(1, total), value, width=cells, complete_style=style, finished_style=style)


def _beside(bar: ProgressBar, text: str) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(bar, Text(text))
    return row


def _reward(row: Row, rewards: Sequence[float], cells: int) -> Text:
    text = Text(f"{_figure(row, 'reward_mean', '.3f')} ± {_figure(row, 'reward_std', '.2f')}   ")
    return text.append(sparkline(rewards, cells), style=_GOOD)


def _score(state: LiveState) -> str:
    """What evaluations measure: `accuracy`, or `held-out reward` where answers are graded."""
    score = held_out_score(to_builtins(list(state.evaluations)))
    return score if score == "accuracy" else f"held-out {score}"


def _accuracy(state: LiveState) -> str:
    """Held-out accuracy, or mean reward of graded answers, of the first policy and of the latest one measured."""
    if not state.evaluations:
        return "not measured yet"
    ordered = sorted(state.evaluations, key=lambda evaluation: evaluation.version)
    first, last = ordered[0], ordered[-1]
    score = held_out_score(to_builtins([first, last]))
    form = score_format(score)
    text = format(first.sampled_accuracy, form)
    if last is not first:
        text += f" -> {format(last.sampled_accuracy, form)} (v{last.version})"
    if last.greedy_accuracy is not None:
        text += f", greedy {format(last.greedy_accuracy, form)}"
    return text


def _staleness(row: Row, bound: int) -> Text:
    oldest = number(row, "age_max")
    if oldest is None:
        return Text(f"no step yet; S = {bound}")
    text = Text(f"max {oldest:.0f} of S = {bound}", style=_GOOD if oldest <= bound else _BAD)
    return text.append(f"   mean {_figure(row, 'age_mean', '.2f')}", style="default")


def _speed(state: LiveState) -> str:
    """Tokens per second on both sides: servers now, trainer over its last step."""
    generated = sum(server.tokens_per_s for server in state.servers)
    trained = tokens_per_s([state.step or {}])
    return f"generate {generated:,.0f} tok/s, train {figure(trained, ',.0f')} tok/s"


def _gap(row: Row) -> str:
    """Difference between the log-probabilities of trainer and engine under the same weights."""
    if number(row, "logprob_gap_mean") is None:
        return "no token of age 0 in the last step" if row else "no step yet"
    mean_gap, largest = _figure(row, "logprob_gap_mean", ".1e"), _figure(row, "logprob_gap_max", ".1e")
    return f"mean {mean_gap}, max {largest} over {_figure(row, 'gap_tokens', ',.0f')} tokens of age 0"


def _time(row: Row) -> str:
    """Seconds of the trainer's last step and the shares of its parts, largest first."""
    parts = seconds_by_part(row)
    total = sum(parts.values())
    if not total:
        return "-"
    shares = sorted(parts.items(), key=lambda part: -part[1])
    shown = "  ".join(f"{name} {spent_s / total:.0%}" for name, spent_s in shares if spent_s / total >= 0.01)
    return f"{total:.2f} s: {shown}"


def _roles(state: LiveState) -> Text:
    """A dot, the state and the load of every role, a few of them on lines of their own; "-" without roles."""
    text, between = Text(), "\n" if len(state.roles) <= _MOST_LINES else "   "
    for index, role in enumerate(state.roles):
        text.append(f"{between if index else ''}● ", style=_STATE_STYLES.get(role.state, _DIM))
        text.append(_role(role, state))
    return text or Text("-")


def _role(role: RoleState, state: LiveState) -> str:
    text = f"{role.name} {role.state}"
    for beat in (server for server in state.servers if server.name == role.name):
        text += f" v{beat.version}, {beat.running} running"
    if role.stage:
        usual = "" if role.usual_s is None else f", last time {role.usual_s:.0f} s"
        text += f": {role.stage}, {role.since_s:.0f} s{usual}"
    if role.restarts:
        text += f", {role.restarts} restart{'s' if role.restarts > 1 else ''}"
    return text


def _figure(row: Row, key: str, form: str) -> str:
    return figure(number(row, key), form)
