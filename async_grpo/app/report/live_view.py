"""LiveView: progress of a run, as a live panel in a terminal and as a line from time to time anywhere else.

    with LiveView(config, console) as view:
        view.phase("preparing the model")
        view.update(state)
        view.say("rollout-0 was killed; restart 1 of 3")

Its owner calls `update` as often as it likes; rich redraws from another thread.
"""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live

from async_grpo.app.report.live_state import LiveState, RoleState
from async_grpo.app.report.panel import line, panel, spinner
from async_grpo.config.schema import RunConfig
from async_grpo.telemetry.rows import number

__all__ = ["LiveState", "LiveView", "RoleState"]

_RECENT_STEPS = 20


class LiveView:
    """Shows the newest `LiveState`. Without a terminal, one line at least `every_s` seconds apart."""

    def __init__(self, config: RunConfig, console: Console, every_s: float = 10.0) -> None:
        self._config = config
        self._console = console
        self._every_s = every_s
        self._lock = threading.Lock()
        self._phase: RenderableType = ""
        self._phase_step: float | None = None
        self._last_step: float | None = None
        self._state: LiveState | None = None
        self._rewards: dict[int, float] = {}
        self._step_s: dict[int, float] = {}
        self._printed: LiveState | None = None
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen, or print it as the last line."""
        self.phase("")
        if self._console.is_terminal:
            self._live.stop()
        elif self._state is not None and self._state is not self._printed:
            self._print_line(self._state)

    def phase(self, text: str) -> None:
        """Show what happens outside the steps (preparing, starting, stopping), until "" or the next step ends it."""
        with self._lock:
            self._phase = spinner(text) if text else ""
            self._phase_step = self._last_step
        if text and not self._console.is_terminal:
            self._print(text)

    def say(self, text: str) -> None:
        """Print a line above the panel; it stays."""
        self._print(text)

    def update(self, state: LiveState) -> None:
        """Show `state`; without a terminal, print a line if the last one is `every_s` old."""
        with self._lock:
            self._remember(state)
            self._state = state
        if not self._console.is_terminal and self._is_due(state):
            self._print_line(state)

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
        """Steps left times the mean of the recent step times."""
        recent = [self._step_s[step] for step in sorted(self._step_s)[-_RECENT_STEPS:]]
        left = max(0, self._config.steps - state.steps_done)
        return left * sum(recent) / len(recent) if recent else None

    def _render(self) -> RenderableType:
        with self._lock:
            if self._state is None:
                return self._phase
            rewards = [self._rewards[step] for step in sorted(self._rewards)]
            eta_s = self._eta_s(self._state)
            return panel(self._config, self._state, rewards=rewards, eta_s=eta_s, phase=self._phase)

    def _is_due(self, state: LiveState) -> bool:
        return self._printed is None or state.elapsed_s - self._printed.elapsed_s >= self._every_s

    def _print_line(self, state: LiveState) -> None:
        self._printed = state
        self._print(line(self._config, state, eta_s=self._eta_s(state)))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
