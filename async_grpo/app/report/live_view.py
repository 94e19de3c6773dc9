"""LiveView: the progress of a run, as a live panel in a terminal and as lines elsewhere.

    terminal    a panel as wide as the terminal
    a file      a legend, then a line for every step, at most one per second; also when a role enters the next stage of
                its start, when an evaluation starts or ends, and every ten seconds

    with LiveView(config, console) as view:
        view.show_phase("preparing the model")
        view.update(state)
        view.print_message("rollout-0 was killed; restart 1 of 3")

`update` may be called at any rate; rich redraws the panel from another thread. Runs and sweeps share `LiveFrame`.
`make_panel` and `format_state` turn a `LiveState` into the panel and the line.
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

from async_grpo.app.report.live_state import LiveState, RoleState, describe_current_wait
from async_grpo.app.report.summary import choose_score_format, name_held_out_score
from async_grpo.config.schema import RunConfig
from async_grpo.telemetry.bottleneck import describe_evaluation
from async_grpo.telemetry.logging import is_json, log_as
from async_grpo.telemetry.rows import Row, mean, number, numbers, rate, seconds_by_part, tokens_per_s
from async_grpo.telemetry.verdict import VerdictAnswer, VerdictState, judge_run, training_reward
from async_grpo.utils.text import figure, sparkline

_RECENT_STEPS = 20
"""Steps whose mean time predicts the remaining time, and whose waits and speed are judged."""
_MIN_LINE_INTERVAL_S = 1.0
"""Minimum seconds between two lines of a log."""
_BAR_WIDTH = 24
"""Characters of a progress bar."""
_MAX_ROLE_LINES = 5
"""Most roles that get a line each; more share lines."""
_GOOD, _BAD, _DIM, _KEY = "green", "red", "bright_black", "cyan"
_VERDICT_SIGNS = {
    VerdictState.YES: ("✓", _GOOD),
    VerdictState.CHECK: ("!", "yellow"),
    VerdictState.NO: ("✗", _BAD),
    VerdictState.UNKNOWN: ("…", _DIM),
}
_LEGEND = (
    "legend of the lines below: reward = mean of the step | age = oldest trained token / max_staleness, in steps | "
    "buffer = groups that hold a slot / slots | gap = mean log-probability difference of trainer and engine, - without "
    "a token of age 0 | who waits | time left, unless no step can end now"
)
_STATE_STYLES = {"running": _GOOD, "finished": _GOOD, "failed": _BAD, "starting": "yellow", "restarting": "yellow"}


class LiveFrame(ABC):
    """A live display in a terminal; elsewhere, lines at least `every_s` seconds apart."""

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
        """Stop redrawing; the last state stays on the screen."""
        self._live.stop()

    @abstractmethod
    def render(self) -> RenderableType:
        """Return the current content of the terminal. rich calls it from its own thread."""

    def print_message(self, text: str) -> None:
        """Print a line above the live display. It stays there."""
        self._write_line("info", text, {})

    def warn(self, text: str, *, level: Literal["warning", "error"] = "warning", **fields: object) -> None:
        """Print a problem like `print_message`; see `Warn`."""
        self._write_line(level, text, fields)

    def _write_line(self, level: Literal["info", "warning", "error"], text: str, fields: Mapping[str, object]) -> None:
        if is_json() and not self._console.is_terminal:
            log_as("supervisor", level, text, fields)
            return
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _is_line_due(self, elapsed_s: float) -> bool:
        """True if `every_s` has passed since the last line, in a log."""
        if self._console.is_terminal:
            return False
        return self._printed_s is None or elapsed_s - self._printed_s >= self._every_s


class LiveView(LiveFrame):
    """The display of a run. Shows its newest `LiveState`."""

    def __init__(self, config: RunConfig, console: Console, every_s: float = 10.0) -> None:
        super().__init__(console, every_s)
        self._config = config
        self._lock = threading.Lock()
        self._phase = ""
        self._phase_start_s = 0.0
        self._phase_step: float | None = None
        """Newest step when the phase started. A later one ends the phase."""
        self._spinner = Spinner("dots")
        self._last_step: float | None = None
        self._state: LiveState | None = None
        self._printed_state: LiveState | None = None
        self._has_legend = False
        # By step, so that a state that is shown twice counts once.
        self._reward_by_step: dict[int, float] = {}
        self._recent_rows: dict[int, Row] = {}
        self._max_age: float | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen, or print it as the last line."""
        self.show_phase("")
        super().__exit__(kind, error, trace)
        self.print_last_state()

    def print_last_state(self) -> None:
        """Print the newest state to a log that does not have it yet. Call it before printing the report's lines."""
        if not self._console.is_terminal and self._state is not None and self._state is not self._printed_state:
            self._print_state(self._state)

    def show_phase(self, text: str) -> None:
        """Show an activity outside the steps (preparing, starting, stopping), until the next step or ""."""
        with self._lock:
            self._phase = text
            self._phase_start_s = time.monotonic()
            self._phase_step = self._last_step
        if text and not self._console.is_terminal:
            self.print_message(text)

    def update(self, state: LiveState) -> None:
        """Show `state`. In a log, print it if there is news or the last line is `every_s` old."""
        with self._lock:
            self._record_step(state)
            self._state = state
        if self._is_line_due(state.elapsed_s) or self._is_news(state):
            self._print_state(state)

    def render(self) -> RenderableType:
        """Return the panel of the newest state, or the phase before the first state."""
        with self._lock:
            phase = self._render_phase()
            if self._state is None:
                return phase
            rewards = self._rewards()
            bar_width = min(max((self._console.width - 56) // 2, 12), 72)
            verdict = self._judge(self._state, rewards)
            return make_panel(self._config, self._state, rewards, verdict, self._eta_s(self._state), phase, bar_width)

    def _rewards(self) -> list[float]:
        return [self._reward_by_step[step] for step in sorted(self._reward_by_step)]

    def _judge(self, state: LiveState, rewards: Sequence[float]) -> list[VerdictAnswer]:
        """Return the verdict so far: waits and speed of the recent steps, everything else since the start."""
        recent = list(self._recent_rows.values())
        recent_s = sum(number(row, "step_s") or 0.0 for row in recent)
        evaluations = sorted(to_builtins(list(state.evaluations)), key=lambda row: int(row["version"]))
        return judge_run(
            {
                "steps": state.steps_done,
                "evaluations": evaluations,
                "held_out_score": name_held_out_score(evaluations),
                **training_reward(rewards),
                "tokens_per_s": tokens_per_s(recent),
                "trainer_idle": rate(sum(number(row, "wait_s") or 0.0 for row in recent), recent_s),
                "max_age": self._max_age,
                "age_bound": self._config.replay_policy.age_bound,
                "logprob_gap_mean": number(state.step or {}, "logprob_gap_mean"),
                "restarts": {role.name: role.restarts for role in state.roles},
            }
        )

    def _render_phase(self) -> RenderableType:
        """Return the phase with its seconds so far, so that something moves while a model is loaded."""
        if not self._phase:
            return ""
        elapsed_s = time.monotonic() - self._phase_start_s
        self._spinner.update(text=Text(f"{self._phase}   {format_duration(elapsed_s)}", style="bold"))
        return self._spinner

    def _is_news(self, state: LiveState) -> bool:
        """True if since the last line a step was trained, a role changed its stage, or an evaluation started or
        ended."""
        last = self._printed_state
        if last is None or self._console.is_terminal or state.elapsed_s - last.elapsed_s < _MIN_LINE_INTERVAL_S:
            return False
        if (last.step or {}).get("step") != (state.step or {}).get("step"):
            return True
        return _stages(last) != _stages(state)

    def _record_step(self, state: LiveState) -> None:
        """Record reward and duration of the newest step. A new step ends the phase."""
        row = state.step or {}
        step = self._last_step = number(row, "step")
        if step is None:
            return
        if step != self._phase_step:
            self._phase = ""

        reward = number(row, "reward_mean")
        if reward is not None:
            self._reward_by_step[int(step)] = reward
        age = number(row, "age_max")
        if age is not None:
            self._max_age = max(age, self._max_age or 0.0)
        self._recent_rows[int(step)] = row
        for old in sorted(self._recent_rows)[:-_RECENT_STEPS]:
            del self._recent_rows[old]

    def _eta_s(self, state: LiveState) -> float | None:
        """Return the remaining steps times the mean of the recent step times; None after the last step.

        Also None while no step can end because the trainer or every server is away: the estimate would stand still.
        """
        step_s = mean(numbers(list(self._recent_rows.values()), "step_s"))
        steps_left = self._config.steps - state.steps_done
        if step_s is None or steps_left <= 0 or _is_halted(state):
            return None
        return steps_left * step_s

    def _print_state(self, state: LiveState) -> None:
        self._printed_state = state
        self._printed_s = state.elapsed_s
        if state.step is not None and not self._has_legend and not is_json():
            self._has_legend = True
            self.print_message(_LEGEND)
        eta_s = self._eta_s(state)
        text = format_state(self._config, state, eta_s)
        self._write_line("info", text, progress_fields(self._config, state, eta_s))


def _is_halted(state: LiveState) -> bool:
    """True while the trainer is not running, or no server reports."""
    trainers = [role for role in state.roles if role.name == "trainer"]
    return not state.servers or any(role.state != "running" for role in trainers)


def _stages(state: LiveState) -> tuple[list[tuple[str, str]], list[bool]]:
    """Return the state and stage of each role, and for each server whether it evaluates."""
    starts = [(role.state, role.stage) for role in state.roles]
    return starts, [server.evaluation is not None for server in state.servers]


def make_panel(
    config: RunConfig,
    state: LiveState,
    rewards: Sequence[float],
    verdict: Sequence[VerdictAnswer],
    eta_s: float | None,
    phase: RenderableType,
    bar_width: int = _BAR_WIDTH,
) -> Panel:
    """Return the panel of a state.

    `rewards`: rewards of all steps so far. `verdict`: answers of `judge_run`. `phase`: line above everything, "" for
    none. `bar_width`: characters of the bars and of the history of rewards.
    """
    table = _state_table(config, state, rewards, verdict, eta_s, bar_width)
    settings = f"max_staleness {config.max_staleness}, {config.groups_per_step} groups of {config.group_size} per step"
    return Panel(
        Group(phase, table) if phase else table,
        title=Text(config.name, style="bold"),
        title_align="left",
        subtitle=Text(f"{settings}   {format_duration(state.elapsed_s)}", style=_DIM),
        subtitle_align="right",
        border_style=_DIM,
        padding=(0, 1),
    )


def _state_table(
    config: RunConfig,
    state: LiveState,
    rewards: Sequence[float],
    verdict: Sequence[VerdictAnswer],
    eta_s: float | None,
    bar_width: int,
) -> RenderableType:
    row = state.step or {}
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_KEY, no_wrap=True)
    table.add_column(overflow="fold")

    steps = f"{state.steps_done} of {config.steps}"
    if eta_s is not None:
        steps += f"   {format_duration(eta_s)} left"
    steps_bar = make_progress_bar(state.steps_done, config.steps, _GOOD, bar_width)
    table.add_row("steps", _bar_with_text(steps_bar, steps))

    table.add_row("verdict", _format_verdict(verdict))
    table.add_row("reward", _format_reward(row, rewards, bar_width))
    table.add_row(_score_label(state), Text(_format_scores(state)))
    for server in state.servers:
        evaluation = describe_evaluation(server)
        if evaluation:
            table.add_row("", Text(f"{server.name} {evaluation}", style="yellow"))
    table.add_row("staleness", _format_staleness(row, config.max_staleness))

    groups = f"{state.active}/{state.capacity}   {state.inflight} in flight, {state.ready} ready, {state.taken} taken"
    buffer_bar = make_progress_bar(state.active, state.capacity, "blue", bar_width)
    table.add_row("buffer", _bar_with_text(buffer_bar, f"{groups}, {state.waiting} tasks left"))

    table.add_row("speed", Text(_format_speed(state)))
    table.add_row("log-prob gap", Text(_format_logprob_gap(row)))
    table.add_row("last step", Text(_format_step_time(row)))
    table.add_row("who waits", Text(describe_current_wait(state, config.groups_per_step), style="bold"))
    table.add_row("roles", _format_roles(state))
    return table


def format_state(config: RunConfig, state: LiveState, eta_s: float | None) -> str:
    """Return the state as one line for a log. Before the first step, it has the wait only."""
    step = f"[{format_duration(state.elapsed_s)}] step {state.steps_done}/{config.steps}"
    wait = describe_current_wait(state, config.groups_per_step)
    if state.step is None:
        return f"{step} | {wait}"

    row = state.step
    parts = [
        step,
        f"reward {_figure(row, 'reward_mean', '.3f')}",
        f"{_score_label(state)} {_format_scores(state)}",
        f"age {_figure(row, 'age_max', '.0f')}/{config.max_staleness}",
        f"buffer {state.active}/{state.capacity}",
        _format_speed(state),
        f"gap {_figure(row, 'logprob_gap_mean', '.1e')}",
        wait,
    ]
    if eta_s is not None:
        parts.append(f"{format_duration(eta_s)} left")
    return " | ".join(parts)


def progress_fields(config: RunConfig, state: LiveState, eta_s: float | None) -> dict[str, object]:
    """Return the numbers of `format_state` as fields of a JSON log, without those that are not known yet."""
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
        "waits": describe_current_wait(state, config.groups_per_step),
    }
    return {name: value for name, value in fields.items() if value is not None}


def format_duration(duration_s: float) -> str:
    """Return seconds as minutes and hours.

    >>> [format_duration(seconds) for seconds in (125, 3725)]
    ['2:05', '1:02:05']
    """
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def make_progress_bar(value: int, total: int, style: str = _GOOD, width: int = _BAR_WIDTH) -> ProgressBar:
    """Return a bar of `width` characters for the share `value` / `total`."""
    return ProgressBar(max(1, total), value, width=width, complete_style=style, finished_style=style)


def _bar_with_text(bar: ProgressBar, text: str) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(bar, Text(text))
    return row


def _format_verdict(verdict: Sequence[VerdictAnswer]) -> Text:
    """Return a line per answer: a sign in the colour of its state, the question, and the answer in a few words."""
    names = {"learning": "learning", "speed": "fast", "soundness": "sound"}
    text = Text()
    for index, answer in enumerate(verdict):
        sign, style = _VERDICT_SIGNS[answer.state]
        text.append("\n" if index > 0 else "")
        text.append(f"{sign} {names[answer.question]}: ", style=style)
        text.append(answer.short)
    return text


def _format_reward(row: Row, rewards: Sequence[float], width: int) -> Text:
    text = Text(f"{_figure(row, 'reward_mean', '.3f')} ± {_figure(row, 'reward_std', '.2f')}   ")
    return text.append(sparkline(rewards, width), style=_GOOD)


def _score_label(state: LiveState) -> str:
    """Return the name of the held-out score: `accuracy`, or `held-out reward` for graded answers."""
    score = name_held_out_score(to_builtins(list(state.evaluations)))
    return score if score == "accuracy" else f"held-out {score}"


def _format_scores(state: LiveState) -> str:
    """Return the held-out scores of the first and the newest measured version."""
    if not state.evaluations:
        return "not measured yet"
    by_version = sorted(state.evaluations, key=lambda evaluation: evaluation.version)
    first, last = by_version[0], by_version[-1]
    form = choose_score_format(name_held_out_score(to_builtins([first, last])))

    text = format(first.sampled_accuracy, form)
    if last is not first:
        text += f" -> {format(last.sampled_accuracy, form)} (v{last.version})"
    if last.greedy_accuracy is not None:
        text += f", greedy {format(last.greedy_accuracy, form)}"
    return text


def _format_staleness(row: Row, bound: int) -> Text:
    oldest = number(row, "age_max")
    if oldest is None:
        return Text(f"no step yet; S = {bound}")
    text = Text(f"max {oldest:.0f} of S = {bound}", style=_GOOD if oldest <= bound else _BAD)
    return text.append(f"   mean {_figure(row, 'age_mean', '.2f')}", style="default")


def _format_speed(state: LiveState) -> str:
    """Return the tokens per second of both sides: the servers' current rate, and the trainer's in its last step."""
    generated = sum(server.tokens_per_s for server in state.servers)
    trained = tokens_per_s([state.step or {}])
    return f"generate {generated:,.0f} tok/s, train {figure(trained, ',.0f')} tok/s"


def _format_logprob_gap(row: Row) -> str:
    """Return the difference between the log-probabilities of trainer and engine under the same weights."""
    if not row:
        return "no step yet"
    if number(row, "logprob_gap_mean") is None:
        return "no token of age 0 in the last step"
    mean_gap, max_gap = _figure(row, "logprob_gap_mean", ".1e"), _figure(row, "logprob_gap_max", ".1e")
    return f"mean {mean_gap}, max {max_gap} over {_figure(row, 'gap_tokens', ',.0f')} tokens of age 0"


def _format_step_time(row: Row) -> str:
    """Return the seconds of the trainer's last step, and the shares of its parts above 1%, largest first."""
    seconds = seconds_by_part(row)
    total_s = sum(seconds.values())
    if not total_s:
        return "-"
    shares = sorted(((part_s / total_s, part) for part, part_s in seconds.items()), key=lambda share: -share[0])
    listed = "  ".join(f"{part} {share:.0%}" for share, part in shares if share >= 0.01)
    return f"{total_s:.2f} s: {listed}"


def _format_roles(state: LiveState) -> Text:
    """Return a dot, the state and the load of every role; "-" without roles. A few roles get a line each."""
    separator = "\n" if len(state.roles) <= _MAX_ROLE_LINES else "   "
    text = Text()
    for index, role in enumerate(state.roles):
        dot = f"{separator}● " if index > 0 else "● "
        text.append(dot, style=_STATE_STYLES.get(role.state, _DIM))
        text.append(_format_role(role, state))
    return text or Text("-")


def _format_role(role: RoleState, state: LiveState) -> str:
    text = f"{role.name} {role.state}"
    for server in state.servers:
        if server.name == role.name:
            text += f" v{server.version}, {server.running} running"
    if role.stage:
        text += f": {role.stage}, {role.since_s:.0f} s"
        if role.usual_s is not None:
            text += f", last time {role.usual_s:.0f} s"
    if role.restarts:
        text += f", {role.restarts} restart{'s' if role.restarts > 1 else ''}"
    return text


def _figure(row: Row, key: str, form: str) -> str:
    return figure(number(row, key), form)
