"""Autoscaler: adjusts the number of rollout servers of `async-grpo run` to the number that the run can use.

    Monitor --rows, heartbeats--> Autoscaler --start_spare, retire_server--> Supervisor
                                      |
                                 ServerDemand (servers that the run can use) --> SteadyDemand (hysteresis)

It never waits: the monitor calls it after every poll. While a server is starting, it decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from async_grpo.app.launch.supervisor import TRAINER, Supervisor
from async_grpo.config import RunConfig
from async_grpo.telemetry.rows import Row
from async_grpo.telemetry.servers_wanted import ServerDemand
from async_grpo.wire.board import ServerBeat


class SteadyDemand:
    """Hysteresis: the number of servers changes only if the demand has been higher, or lower, for `after_s` seconds."""

    def __init__(self, min_servers: int, max_servers: int, after_s: float) -> None:
        self._min_servers = min_servers
        self._max_servers = max_servers
        self._after_s = after_s
        self._history: deque[tuple[float, int]] = deque()
        """(time in seconds, demand) of the last `after_s` seconds, oldest first."""

    def update_target(self, now_s: float, demand: int, running: int) -> int:
        """Record the demand and return the number of servers to run.

        This is the minimum demand of the last `after_s` seconds if that is more than `running`, the maximum if that is
        less, else `running`.
        """
        demand = min(self._max_servers, max(self._min_servers, demand))
        self._history.append((now_s, demand))

        # Keep the newest entry that is at least `after_s` old: the demand had that value when the period started.
        while len(self._history) > 1 and self._history[1][0] <= now_s - self._after_s:
            self._history.popleft()
        if self._history[0][0] > now_s - self._after_s:
            return running  # the history is shorter than the period

        demands = [count for _, count in self._history]
        return max(min(demands), min(running, max(demands)))

    def reset(self) -> None:
        """Clear the history, after the number of servers has changed."""
        self._history.clear()


class Autoscaler:
    """Runs between rollout.servers and launch.autoscale.max_servers servers."""

    def __init__(self, config: RunConfig, supervisor: Supervisor, report_progress: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._report_progress = report_progress
        self._max_servers = config.max_servers_at_once
        self._demand = ServerDemand.of(config)
        self._steady_demand = SteadyDemand(config.rollout.servers, self._max_servers, config.launch.autoscale.after_s)

    def scale_servers(self, rows: Sequence[Row], beats: Sequence[ServerBeat]) -> None:
        """Update the demand from the rows of new steps and from heartbeats; after a step, start or stop servers."""
        for row in rows:
            self._demand.add_step(row)
        self._demand.add_heartbeats(beats)

        servers = [name for name in self._supervisor.states if name != TRAINER and self._supervisor.is_active(name)]
        reporting = {beat.name for beat in beats}
        if not rows or reporting.isdisjoint(servers) or not self._are_running(servers):
            return
        demand = self._demand.estimate_servers(self._max_servers)
        if demand is None:
            return

        target = self._steady_demand.update_target(time.monotonic(), demand, len(servers))
        for _ in range(target - len(servers)):
            started = self._supervisor.start_spare()
            if started is not None:
                self._report_progress(f"{started} joins: the run can use {target} rollout servers")

        # Stop the newest servers first. One that is evaluating stays: the evaluation would have to start again.
        evaluating = {beat.name for beat in beats if beat.evaluation is not None}
        idle = [name for name in reversed(servers) if self._supervisor.can_retire(name) and name not in evaluating]
        for name in idle[: max(0, len(servers) - target)]:
            self._report_progress(f"{name} leaves: the run can use {target} rollout servers")
            self._supervisor.retire_server(name)

        if target != len(servers):
            self._steady_demand.reset()

    def _are_running(self, names: Iterable[str]) -> bool:
        return all(self._supervisor.states[name].state == "running" for name in names)
