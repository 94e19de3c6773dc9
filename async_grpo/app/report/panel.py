"""A `LiveState` as a panel for terminals or as one compact line for logs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from async_grpo.app.report.live_state import LiveState, RoleState, who_waits
from async_grpo.config.schema import RunConfig
from async_grpo.telemetry.rows import Row, number, seconds_by_part
from async_grpo.utils.text import sparkline

_BAR_CELLS = 24
_SPARK_CELLS = 24
_GOOD, _BAD, _DIM, _KEY = "green", "red", "bright_black", "cyan"
_STATE_STYLES = {"running": _GOOD, "finished": _GOOD, "failed": _BAD, "starting": "yellow", "restarting": "yellow"}


def panel(
    config: RunConfig, state: LiveState, *, rewards: Sequence[float], eta_s: float | None, phase: RenderableType
) -> Panel:
    """The panel. `rewards` is the history so far; `phase` stands above everything ("" for none)."""
    row = state.step or {}
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_KEY, no_wrap=True)
    table.add_column()
    table.add_row("steps", _progress(state.steps_done, config.steps, eta_s))
    table.add_row("reward", _reward(row, rewards))
    table.add_row("accuracy", Text(accuracy_text(state)))
    table.add_row("staleness", _staleness(row, config.max_staleness))
    table.add_row("buffer", _buffer(state))
    table.add_row("speed", Text(speed_text(state)))
    table.add_row("log-prob gap", Text(gap_text(row)))
    table.add_row("last step", Text(time_text(row)))
    table.add_row("who waits", Text(who_waits(state, config.groups_per_step), style="bold"))
    table.add_row("roles", _roles(state))
    title = f"{config.name}  S={config.max_staleness}  P={config.groups_per_step}  G={config.group_size}"
    return Panel(
        Group(phase, table) if phase else table,
        title=Text(title, style="bold"),
        title_align="left",
        subtitle=Text(clock(state.elapsed_s), style=_DIM),
        subtitle_align="right",
        border_style=_DIM,
        padding=(0, 1),
        width=104,
    )


def line(config: RunConfig, state: LiveState, *, eta_s: float | None) -> str:
    """The state in one line, for a log."""
    row = state.step or {}
    age = number(row, "age_max")
    parts = [
        f"[{clock(state.elapsed_s)}] step {state.steps_done}/{config.steps}",
        f"reward {_figure(row, 'reward_mean', '.3f')}",
        f"accuracy {accuracy_text(state)}",
        f"age {'-' if age is None else int(age)}/{config.max_staleness}",
        f"buffer {state.active}/{state.capacity}",
        speed_text(state),
        f"gap {_figure(row, 'logprob_gap_mean', '.1e')}",
        who_waits(state, config.groups_per_step),
    ]
    return " | ".join(parts if eta_s is None else [*parts, f"{clock(eta_s)} left"])


def spinner(text: str) -> Spinner:
    """A spinner beside `text`, for what is being prepared."""
    return Spinner("dots", text=Text(text, style="bold"))


def clock(seconds: float) -> str:
    """125 -> "2:05"; 3725 -> "1:02:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def accuracy_text(state: LiveState) -> str:
    """Held-out accuracy of the first policy and of the latest one measured."""
    if not state.evaluations:
        return "not measured yet"
    ordered = sorted(state.evaluations, key=lambda evaluation: evaluation.version)
    first, last = ordered[0], ordered[-1]
    text = f"{first.sampled_accuracy:.1%}"
    if last is not first:
        text += f" -> {last.sampled_accuracy:.1%} (v{last.version})"
    if last.greedy_accuracy is not None:
        text += f", greedy {last.greedy_accuracy:.1%}"
    return text


def speed_text(state: LiveState) -> str:
    """Tokens per second on both sides: servers now, trainer over its last step."""
    generated = sum(server.tokens_per_s for server in state.servers)
    row = state.step or {}
    tokens, step_s = number(row, "trained_tokens"), number(row, "step_s")
    trained = f"{tokens / step_s:,.0f}" if tokens is not None and step_s else "-"
    return f"generate {generated:,.0f} tok/s, train {trained} tok/s"


def gap_text(row: Row) -> str:
    """Difference between the log-probabilities of trainer and engine under the same weights."""
    mean, largest = _figure(row, "logprob_gap_mean", ".1e"), _figure(row, "logprob_gap_max", ".1e")
    return f"mean {mean}, max {largest} over {_figure(row, 'gap_tokens', ',.0f')} tokens of age 0"


def time_text(row: Row) -> str:
    """Seconds of the trainer's last step and the shares of its parts, largest first."""
    parts = seconds_by_part(row)
    total = sum(parts.values())
    if not total:
        return "-"
    shares = sorted(parts.items(), key=lambda part: -part[1])
    shown = "  ".join(f"{name} {spent_s / total:.0%}" for name, spent_s in shares if spent_s / total >= 0.01)
    return f"{total:.2f} s: {shown}"


def _progress(done: int, total: int, eta_s: float | None) -> Table:
    left = "" if eta_s is None else f"   {clock(eta_s)} left"
    return _bar(done, total, f"{done} of {total}{left}", _GOOD)


def _buffer(state: LiveState) -> Table:
    places = f"{state.inflight} in flight, {state.ready} ready, {state.taken} taken, {state.waiting} tasks left"
    return _bar(state.active, state.capacity, f"{state.active}/{state.capacity}   {places}", "blue")


def _bar(value: int, total: int, text: str, style: str) -> Table:
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(max(1, total), value, width=_BAR_CELLS, complete_style=style, finished_style=style)
    row.add_row(bar, Text(text))
    return row


def _reward(row: Row, rewards: Sequence[float]) -> Text:
    mean, std = _figure(row, "reward_mean", ".3f"), _figure(row, "reward_std", ".2f")
    return Text(f"{mean} ± {std}   ").append(sparkline(rewards, _SPARK_CELLS), style=_GOOD)


def _staleness(row: Row, bound: int) -> Text:
    oldest = number(row, "age_max")
    if oldest is None:
        return Text(f"no step yet; S = {bound}")
    kept = oldest <= bound
    text = Text(f"max {oldest:.0f} of S = {bound}", style=_GOOD if kept else _BAD)
    return text.append(f"   mean {_figure(row, 'age_mean', '.2f')}", style="default")


def _roles(state: LiveState) -> Text:
    text = Text()
    for role in state.roles:
        text.append("● ", style=_STATE_STYLES.get(role.state, _DIM))
        text.append(f"{_role(role, state)}   ")
    return text if state.roles else Text("-")


def _role(role: RoleState, state: LiveState) -> str:
    beat = next((server for server in state.servers if server.name == role.name), None)
    text = f"{role.name} {role.state}"
    if beat is not None:
        text += f" v{beat.version}, {beat.running} running"
    if role.restarts:
        text += f", {role.restarts} restart{'s' if role.restarts > 1 else ''}"
    return text


def _figure(row: Row, key: str, form: str) -> str:
    value = number(row, key)
    return "-" if value is None else format(value, form)
