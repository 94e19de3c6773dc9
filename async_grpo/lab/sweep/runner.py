"""SweepRunner: runs the points of a sweep, `at_once` at a time, each with `async-grpo run` in its own process.

    waiting --start--> running --process exits--> finished | failed | stopped
       |                  |
       +-- fewer than     +-- Ctrl-C: SIGTERM to every run, which stops cleanly;
           `at_once` runs     a second Ctrl-C: SIGTERM again, which stops runs immediately;
           and enough free    at the deadline: SIGKILL
           devices

The runner waits for any run to end, at most half a second at a time, and then reads the progress of the others. The
failure of one run is recorded and does not affect the others. If this process dies, the kernel kills its runs; if a run
dies, its roles.

No accelerator belongs to two runs. With one run at a time it gets the devices that `async-grpo run` would use. With
several at a time each gets some of them, through the environment variable that `async_grpo.app.launch.role_specs`
reads.
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
from trainer.platform import list_platforms, select_platform
from trainer.platform.base import visible_devices

POLL_EVERY_S = 0.5
REPORT_TIMEOUT_S = 60.0
"""Seconds for a stopped run to write its report, on top of launch.stop_timeout_s."""
_WIDE_TERMINAL = {"COLUMNS": "1000", "FORCE_COLOR": "", "TERM": "dumb"}
"""Environment that keeps an error on one line of the log, where the runner looks for it."""


def required_devices(config: RunConfig) -> tuple[str, int]:
    """Return platform and number of the accelerators that a run needs; ("", 0) if it needs none.

    Raises ConfigError if trainer and engine need different kinds.
    """
    environments = [environment for environment in assign_devices(config, {}).values() if environment]
    for platform in list_platforms():
        count = sum(len(visible_devices(platform, environment) or ()) for environment in environments)
        if count:
            return platform.name, count
    return "", 0


def available_devices(platform_name: str, environment: Mapping[str, str]) -> list[str]:
    """Return the accelerators that runs may use, as the environment variable names them.

    Raises ConfigError if the variable is not set and the vendor's tool finds none.
    """
    platform = select_platform(platform_name)
    devices = visible_devices(platform, environment)
    if devices is None:
        devices = [str(device.index) for device in platform.list_devices()]
    if not devices:
        raise ConfigError(
            f"--at-once above 1 divides the devices among the runs, but {platform.visible_variable} is not set and "
            f"{platform.tool} finds none. Set {platform.visible_variable}, or leave --at-once out"
        )
    return devices


@dataclass(slots=True)
class DevicePool:
    """Accelerators of one platform, and which run uses which."""

    platform: str
    free: list[str]
    _used: dict[str, list[str]] = field(default_factory=dict)

    def take(self, run: str, count: int) -> dict[str, str] | None:
        """Reserve `count` devices for `run`.

        Returns the environment that makes them visible, or None if too few are free.
        """
        if count > len(self.free):
            return None
        if not count:
            return {}
        self._used[run] = self.free[:count]
        self.free = self.free[count:]
        return {select_platform(self.platform).visible_variable: ",".join(self._used[run])}

    def give_back(self, run: str) -> None:
        """Free the devices of `run`, if it has any."""
        self.free = [*self.free, *self._used.pop(run, [])]


def make_device_pool(configs: Sequence[RunConfig], at_once: int, environment: Mapping[str, str]) -> DevicePool | None:
    """Return the devices to divide among the runs; None with one run at a time, or if no run needs a device.

    Raises ConfigError if a run needs more devices than there are, or if the runs need several platforms.
    """
    required = [required_devices(config) for config in configs]
    platform_names = {platform for platform, count in required if count}
    if at_once == 1 or not platform_names:
        return None
    if len(platform_names) > 1:
        names = " and ".join(sorted(platform_names))
        raise ConfigError(f"points on {names}: sweep them one at a time (without --at-once)")

    (platform_name,) = platform_names
    devices = available_devices(platform_name, environment)
    largest = max(count for _, count in required)
    if largest > len(devices):
        raise ConfigError(
            f"a point of this sweep needs {largest} devices, and there are {len(devices)}: {', '.join(devices)}"
        )
    return DevicePool(platform_name, devices)


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


def classify_outcome(*, finished: bool, stopping: bool) -> AttemptOutcome:
    """Return the outcome of an attempt whose process has exited.

    The exit code does not matter: a run that finished just before SIGTERM exits with 130 but is finished, and a code of
    0 alone does not prove that a run finished.
    """
    if finished:
        return AttemptOutcome.FINISHED
    return AttemptOutcome.STOPPED if stopping else AttemptOutcome.FAILED


@dataclass(slots=True)
class _Attempt:
    """An attempt in progress."""

    point: Point
    process: RoleProcess
    follower: RowFollower
    started_s: float
    start_step: int = 0
    """Newest step of an earlier attempt, which this one resumes."""
    newest_row: Row = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(number(self.newest_row, "step") or 0)

    def read_progress(self) -> None:
        for row in self.follower.read_new_rows():
            if row.get("kind") == "step":
                self.newest_row = row


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
        on_end: Callable[[AttemptResult], None],
        argv: Callable[[Point], Sequence[str]] | None = None,
    ) -> None:
        """Prepare to run `points`.

        Args:
            points: Points to run.
            folder: Folder of the sweep.
            total: Number of points of the sweep, including the finished ones.
            at_once: Maximum number of runs at the same time.
            pool: Devices to divide among the runs; None for all devices to each run.
            show: Called with the state about twice per second.
            on_end: Called with the result of every attempt.
            argv: Command that runs a point (default: `folder.run_argv`). It must exit with 0 when the point is trained
                and stop on SIGTERM.
        """
        self._waiting = list(points)
        stop_timeouts_s = [point.config.launch.stop_timeout_s for point in points]
        self._stop_timeout_s = REPORT_TIMEOUT_S + max(stop_timeouts_s, default=0.0)
        self._folder = folder
        self._argv = argv or folder.run_argv
        self._total = total
        self._finished_before = total - len(points)
        self._at_once = at_once
        self._pool = pool
        self._show = show
        self._on_end = on_end
        self._running: dict[asyncio.Task[int], _Attempt] = {}
        self._results: list[AttemptResult] = []
        self._ended_steps = 0
        self._ended_s = 0.0
        self._started_s = time.monotonic()
        self.stopping = False

    async def run_points(self) -> list[AttemptResult]:
        """Attempt every point; after Ctrl-C, wait for the running ones. Returns the results in the order of ending."""
        with stop_signals(self.stop):
            try:
                while True:
                    await self._start_waiting_points()
                    if not self._running:
                        break
                    done, _ = await asyncio.wait(
                        self._running, timeout=POLL_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        self._record_end(task)
                    for attempt in self._running.values():
                        attempt.read_progress()
                    self._show(self._state())
            finally:  # leave no run behind, even after an error of this runner
                self._kill_all()
                await asyncio.gather(*self._running, return_exceptions=True)
        return self._results

    def stop(self) -> None:
        """Start no more runs and send SIGTERM to all; on a second call runs stop immediately. Never blocks."""
        if not self.stopping:
            asyncio.get_running_loop().call_later(self._stop_timeout_s, self._kill_all)
        self.stopping = True
        for attempt in self._running.values():
            attempt.process.terminate()

    async def _start_waiting_points(self) -> None:
        """Start points in order while there are places and devices.

        A point that does not fit blocks the ones behind it. Otherwise small runs could keep a large one waiting until
        the end of the sweep.
        """
        while self._waiting and not self.stopping and len(self._running) < self._at_once:
            point = self._waiting[0]
            environment: dict[str, str] | None = {}
            if self._pool is not None:
                _, count = required_devices(point.config)
                environment = self._pool.take(point.name, count)
            if environment is None:
                return
            self._waiting.pop(0)
            await self._start_attempt(point, environment)

    async def _start_attempt(self, point: Point, environment: dict[str, str]) -> None:
        log = self._folder.log_file(point.name)
        spec = RoleSpec(point.name, self._argv(point), log, max_restarts=0, env={**_WIDE_TERMINAL, **environment})
        process = await RoleProcess.start(spec, f"sweep {self._folder.path.name}")
        follower = RowFollower(point.config.run_dir / "metrics.jsonl")
        attempt = _Attempt(point, process, follower, time.monotonic())
        attempt.read_progress()
        attempt.start_step = attempt.step
        self._running[asyncio.create_task(process.wait(), name=f"run {point.name}")] = attempt

        # A Ctrl-C during the start did not see this process in `_running`.
        if self.stopping:
            process.terminate()

    def _record_end(self, task: asyncio.Task[int]) -> None:
        attempt = self._running.pop(task)
        attempt.read_progress()
        if self._pool is not None:
            self._pool.give_back(attempt.point.name)
        self._ended_steps += attempt.step - attempt.start_step
        self._ended_s += time.monotonic() - attempt.started_s

        outcome = classify_outcome(finished=attempt.point.is_finished, stopping=self.stopping)
        error = attempt.process.explain(task.result()) if outcome is AttemptOutcome.FAILED else ""
        result = AttemptResult(attempt.point, outcome, error)
        self._results.append(result)
        self._on_end(result)

    def _state(self) -> SweepState:
        now_s = time.monotonic()
        running = [
            RunningPoint(
                label=str(attempt.point),
                step=attempt.step,
                steps=attempt.point.config.steps,
                start_step=attempt.start_step,
                elapsed_s=now_s - attempt.started_s,
                reward=number(attempt.newest_row, "reward_mean"),
            )
            for attempt in self._running.values()
        ]
        steps_of_running = sum(point.steps - point.step for point in running)
        steps_of_waiting = sum(point.config.steps for point in self._waiting)
        outcomes = [result.outcome for result in self._results]
        return SweepState(
            total=self._total,
            finished=self._finished_before + outcomes.count(AttemptOutcome.FINISHED),
            failed=outcomes.count(AttemptOutcome.FAILED),
            running=running,
            steps_left=steps_of_running + steps_of_waiting,
            at_once=self._at_once,
            ended_steps=self._ended_steps,
            ended_s=self._ended_s,
            elapsed_s=now_s - self._started_s,
            stopping=self.stopping,
        )

    def _kill_all(self) -> None:
        for attempt in self._running.values():
            attempt.process.kill()
