"""Autoscaler: starts and stops rollout servers of `async-grpo run` by what the run can use.

    Monitor --rows, heartbeats--> Autoscaler --start_spare, retire_server--> Supervisor
                                      |
                                 ServerDemand (how many the run can use) --> SteadyDemand (since when)

It waits for nothing: the monitor calls it after every look. While a server starts, nothing is decided.
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
    """Hysteresis: a number of servers that was wanted for `after_s` seconds without exception."""

    def __init__(self, least: int, most: int, after_s: float) -> None:
        self._least, self._most, self._after_s = least, most, after_s
        self._wanted: deque[tuple[float, int]] = deque()

    def target(self, now_s: float, wanted: int, running: int) -> int:
        """The servers to have now that so many are wanted: the fewest of the last `after_s` seconds if these are more
        than run, the most if they are fewer, else `running`."""
        self._wanted.append((now_s, min(self._most, max(self._least, wanted))))
        while len(self._wanted) > 1 and self._wanted[1][0] <= now_s - self._after_s:
            self._wanted.popleft()
        if self._wanted[0][0] > now_s - self._after_s:
            return running  # not known for so long
        counts = [count for _, count in self._wanted]
        return max(min(counts), min(running, max(counts)))

    def forget(self) -> None:
        """Begin again: the number of servers has changed."""
        self._wanted.clear()


class Autoscaler:
    """Keeps between rollout.servers and launch.autoscale.max_servers servers."""

    def __init__(self, config: RunConfig, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        self._supervisor, self._say = supervisor, say
        self._most = config.most_servers
        self._demand = ServerDemand.of(config)
        self._steady = SteadyDemand(config.rollout.servers, self._most, config.launch.autoscale.after_s)

    def look(self, rows: Sequence[Row], beats: Sequence[ServerBeat]) -> None:
        """Learn from the rows of new steps and from heartbeats; after a step, start or stop servers if it is time."""
        for row in rows:
            self._demand.step(row)
        self._demand.beats(beats)
        kept = [name for name in self._supervisor.states if name != TRAINER and self._supervisor.is_active(name)]
        if not rows or {beat.name for beat in beats}.isdisjoint(kept) or not self._all_run(kept):
            return
        wanted = self._demand.wanted(self._most)
        if wanted is None:
            return
        target = self._steady.target(time.monotonic(), wanted, len(kept))
        for _ in range(target - len(kept)):
            if name := self._supervisor.start_spare():
                self._say(f"{name} joins: the run can use {target} rollout servers")
        evaluating = {beat.name for beat in beats if beat.evaluation is not None}
        spare = [name for name in reversed(kept) if self._supervisor.can_retire(name) and name not in evaluating]
        for name in spare[: max(0, len(kept) - target)]:
            self._say(f"{name} leaves: the run can use {target} rollout servers")
            self._supervisor.retire_server(name)
        if target != len(kept):
            self._steady.forget()

    def _all_run(self, names: Iterable[str]) -> bool:
        return all(self._supervisor.states[name].state == "running" for name in names)
