"""SweepRunner: runs the points of a sweep, `at_once` at a time, each with `async-grpo run` in its own process.

    waiting --start--> running --its end--> finished | failed | stopped
       |                  |
       +-- free place, free devices        Ctrl-C: SIGTERM to every run, which stops cleanly;
                                           a second Ctrl-C: SIGTERM again, and runs stop at once;
                                           at the deadline: SIGKILL

The runner waits for the end of any run, at most half a second; then it reads how far the others are. The failure of one
run is recorded and changes nothing for the others. If this process dies, the kernel kills its runs; if a run dies, its
roles.

No accelerator belongs to two runs. A single run gets the devices that `async-grpo run` would use; of several runs at
once each gets a share, through the environment variable that `async_grpo.app.launch.role_specs` reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from async_grpo.app.launch.role_process import RoleProcess, RoleSpec
from async_grpo.app.launch.role_specs import assign_devices
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.lab.sweep.folder import SweepFolder
from async_grpo.lab.sweep.plan import Point
from async_grpo.lab.sweep.progress import RunningPoint, SweepState
from async_grpo.telemetry.jsonl import RowFollower
from async_grpo.telemetry.rows import Row, number
from async_grpo.utils.aio import stop_signals
from trainer.platform import platforms, select_platform
from trainer.platform.base import visible

LOOK_EVERY_S = 0.5
REPORT_PATIENCE_S = 60.0
"""Time that a stopped run has beyond launch.stop_timeout_s, to write its report."""
_WIDE = {"COLUMNS": "1000", "FORCE_COLOR": "", "TERM": "dumb"}
"""Environment that keeps an error on one line of the log."""


def devices_wanted(config: RunConfig) -> tuple[str, int]:
    """Platform and number of the accelerators that a run needs; ("", 0) if it needs none. Raises ConfigError if its two
    sides need different kinds."""
    shown = [own for own in assign_devices(config, {}).values() if own]
    for platform in platforms():
        count = sum(len(visible(platform, own) or ()) for own in shown)
        if count:
            return platform.name, count
    return "", 0


def devices_here(platform: str, environment: Mapping[str, str]) -> list[str]:
    """The accelerators that runs may use, as the environment variable names them. Raises ConfigError if none are
    named and the vendor's tool finds none."""
    kind = select_platform(platform)
    named = visible(kind, environment)
    found = named if named is not None else [str(device.index) for device in kind.devices()]
    if not found:
        raise ConfigError(
            f"--at-once above 1 needs to know the devices to share out, but {kind.visible_variable} is not set and "
            f"{kind.tool} finds none. Set {kind.visible_variable}, or leave --at-once out"
        )
    return found


@dataclass(slots=True)
class DevicePool:
    """The accelerators of one platform that no run has taken."""

    platform: str
    free: list[str]
    _taken: dict[str, list[str]] = field(default_factory=dict)

    def take(self, run: str, count: int) -> dict[str, str] | None:
        """Take `count` devices for `run`; returns the environment that shows it these, None if too few are free."""
        if count > len(self.free):
            return None
        if not count:
            return {}
        self._taken[run], self.free = self.free[:count], self.free[count:]
        return {select_platform(self.platform).visible_variable: ",".join(self._taken[run])}

    def give_back(self, run: str) -> None:
        """Make the devices of `run` free again, if it has any."""
        self.free = [*self.free, *self._taken.pop(run, [])]


def pool_for(configs: Sequence[RunConfig], at_once: int, environment: Mapping[str, str]) -> DevicePool | None:
    """The devices to share out; None if one run at a time goes on, or none needs a device.

    Raises ConfigError if a run needs more devices than there are, or if the runs need several platforms.
    """
    wanted = [devices_wanted(config) for config in configs]
    platforms = {platform for platform, count in wanted if count}
    if at_once == 1 or not platforms:
        return None
    if len(platforms) > 1:
        raise ConfigError(f"points on {' and '.join(sorted(platforms))}: sweep them one at a time (without --at-once)")
    (platform,) = platforms
    here, most = devices_here(platform, environment), max(count for _, count in wanted)
    if most > len(here):
        raise ConfigError(f"a point of this sweep needs {most} devices, and there are {len(here)}: {', '.join(here)}")
    return DevicePool(platform, here)


class AttemptOutcome(Enum):
    """How an attempt at a point ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How one attempt ended; `error` is "" unless it failed."""

    point: Point
    outcome: AttemptOutcome
    error: str = ""


def outcome_of(*, code: int, finished: bool, stopping: bool) -> AttemptOutcome:
    """The outcome of an attempt with the exit code `code`.

    A run that finished before it could be stopped counts as finished; a code of 0 alone does not prove that it did.
    """
    if finished:
        return AttemptOutcome.FINISHED
    return AttemptOutcome.STOPPED if stopping else AttemptOutcome.FAILED


@dataclass(slots=True)
class _Run:
    """An attempt in progress."""

    point: Point
    role: RoleProcess
    follower: RowFollower
    started_s: float
    begun_at: int = 0
    row: Row = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(number(self.row, "step") or 0)

    def look(self) -> None:
        for row in self.follower.read_new_rows():
            if row.get("kind") == "step":
                self.row = row


class SweepRunner:
    """Attempts every waiting point once, unless it is stopped."""

    def __init__(
        self,
        points: Sequence[Point],
        folder: SweepFolder,
        *,
        total: int,
        at_once: int,
        pool: DevicePool | None,
        show: Callable[[SweepState], None],
        ended: Callable[[AttemptResult], None],
        argv: Callable[[Point], Sequence[str]] | None = None,
    ) -> None:
        """`argv` is the command that runs a point (default: `folder.argv`). It exits with 0 when the point is trained,
        and stops on SIGTERM.

        `total` counts the points of the sweep, the finished ones included. `show` gets the state about twice a second,
        `ended` the result of every attempt.
        """
        self._waiting = list(points)
        self._patience_s = REPORT_PATIENCE_S + max((p.config.launch.stop_timeout_s for p in points), default=0.0)
        self._folder = folder
        self._argv = argv or folder.argv
        self._total = total
        self._before = total - len(points)
        self._at_once = at_once
        self._pool = pool
        self._show = show
        self._ended = ended
        self._running: dict[asyncio.Task[int], _Run] = {}
        self._results: list[AttemptResult] = []
        self._made_steps, self._spent_s = 0, 0.0
        self._started_s = time.monotonic()
        self.stopping = False

    async def work(self) -> list[AttemptResult]:
        """Attempt every point; after Ctrl-C, wait until no run is left. Returns the results in the order of ending."""
        with stop_signals(self.stop):
            try:
                while await self._fill():
                    done, _ = await asyncio.wait(
                        self._running, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        self._note_end(task)
                    for run in self._running.values():
                        run.look()
                    self._show(self._state())
            finally:  # leave no run behind, even after an error of this runner
                self._kill()
                await asyncio.gather(*self._running, return_exceptions=True)
        return self._results

    def stop(self) -> None:
        """Start nothing more and ask all runs to stop; a second call makes them stop at once. Never blocks."""
        if not self.stopping:
            asyncio.get_running_loop().call_later(self._patience_s, self._kill)
        self.stopping = True
        for run in self._running.values():
            run.role.terminate()

    async def _fill(self) -> bool:
        """Start as many runs as there is room for; False if no run is left to wait for."""
        while self._waiting and not self.stopping and len(self._running) < self._at_once:
            point = self._waiting[0]
            environment = {} if self._pool is None else self._pool.take(point.name, devices_wanted(point.config)[1])
            if environment is None:
                break
            await self._start(self._waiting.pop(0), environment)
        return bool(self._running)

    async def _start(self, point: Point, environment: dict[str, str]) -> None:
        log = self._folder.log(point.name)
        spec = RoleSpec(point.name, self._argv(point), log, max_restarts=0, env={**_WIDE, **environment})
        role = await RoleProcess.start(spec, f"sweep {self._folder.path.name}")
        run = _Run(point, role, RowFollower(point.config.run_dir / "metrics.jsonl"), time.monotonic())
        run.look()
        run.begun_at = run.step
        self._running[asyncio.create_task(role.wait(), name=f"run {point.name}")] = run
        if self.stopping:  # asked for while it was being started
            role.terminate()

    def _note_end(self, task: asyncio.Task[int]) -> None:
        run = self._running.pop(task)
        run.look()
        if self._pool is not None:
            self._pool.give_back(run.point.name)
        self._made_steps += run.step - run.begun_at
        self._spent_s += time.monotonic() - run.started_s
        code = task.result()
        outcome = outcome_of(code=code, finished=run.point.is_finished, stopping=self.stopping)
        error = run.role.explain(code) if outcome is AttemptOutcome.FAILED else ""
        self._results.append(AttemptResult(run.point, outcome, error))
        self._ended(self._results[-1])

    def _state(self) -> SweepState:
        now_s = time.monotonic()
        running = [
            RunningPoint(
                label=str(run.point),
                step=run.step,
                steps=run.point.config.steps,
                begun_at=run.begun_at,
                elapsed_s=now_s - run.started_s,
                reward=number(run.row, "reward_mean"),
            )
            for run in self._running.values()
        ]
        return SweepState(
            total=self._total,
            finished=self._before + sum(result.outcome is AttemptOutcome.FINISHED for result in self._results),
            failed=sum(result.outcome is AttemptOutcome.FAILED for result in self._results),
            running=running,
            steps_left=sum(run.steps - run.step for run in running) + sum(p.config.steps for p in self._waiting),
            at_once=self._at_once,
            made_steps=self._made_steps,
            spent_s=self._spent_s,
            elapsed_s=now_s - self._started_s,
            stopping=self.stopping,
        )

    def _kill(self) -> None:
        for run in self._running.values():
            run.role.kill()
