"""Report of a run whose roles are started separately, in containers or on a cluster.

    CONFIG --> folder and server of the run --poll--> over? --roles have exited--> run.json, summary.json, report.md

`async-grpo run` measures the wall time and writes the report itself. Here a separate process follows the run, on the
machine that has the trainer's run folder. It starts nothing and decides nothing. After SIGTERM it reports the steps so
far; when it is started again, it continues and adds to the wall time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from async_grpo.app.launch.plan import load_run_config
from async_grpo.app.launch.results import format_headline, write_results
from async_grpo.app.launch.run_copy import copy_results
from async_grpo.app.launch.run_folder import RunFolder, RunState
from async_grpo.app.launch.state_plane import StatePlane
from async_grpo.config import RunConfig
from async_grpo.errors import AsyncGrpoError, ConfigError, RoleFailed, ServerLost
from async_grpo.telemetry.logging import copy_log
from async_grpo.utils.aio import Overtaken, race, stop_signals
from async_grpo.utils.files import is_locked
from buffer import attach, connect_board, is_run_over, run_exists

POLL_EVERY_S = 1.0
SAVE_EVERY_S = 30.0
"""Seconds between two writes of the wall time: the maximum that is lost by a kill."""
ROLE = "report"


def follow_run(path: Path, report_progress: Callable[[str], None]) -> int:
    """Wait until the run is over and write its report. `path`: its configuration or its folder.

    Raises ConfigError without redis.url, RoleFailed if no trainer starts the run within launch.ready_timeout_s.
    """
    config = load_run_config(path, [])
    if config.redis.url is None:
        raise ConfigError(
            "redis.url is not set, so this run has its own server, and `async-grpo run` writes its report. To write "
            "the report again, use this command without --wait"
        )
    return asyncio.run(RunFollower(config, report_progress).follow())


class RunFollower:
    """Follows one run to its end."""

    def __init__(self, config: RunConfig, report_progress: Callable[[str], None]) -> None:
        self._config = config
        self._report_progress = report_progress
        self._folder = RunFolder(config.run_dir.absolute())
        self._started_s = time.monotonic()
        self._saved_s = self._started_s
        self._wall_before_s = 0.0

    async def follow(self) -> int:
        """Wait for the end of the run or for SIGTERM, then write run.json and the report. Returns the exit code."""
        try:
            return await self._follow()
        except AsyncGrpoError as error:
            if self._folder.config_file.exists():
                state = self._folder.read_state()
                state.failure = f"{type(error).__name__}: {error}"
                self._folder.write_state(state)
            raise

    async def _follow(self) -> int:
        stopped = asyncio.Event()
        with stop_signals(stopped.set):
            try:
                await race(self._wait_for_start(), stopped.wait())
            except Overtaken:
                self._report_progress("stopped before the run started: there is nothing to report")
                return 0
            if self._is_finished():
                self._report_progress(f"this run is finished: see {self._folder.path / 'report.md'}")
                return 0
            self._folder.lock_role(ROLE)
            copy_log(self._folder.log(ROLE))
            self._wall_before_s = self._folder.read_state().wall_s
            async with AsyncExitStack() as stack:
                plane = await self._connect(stack)
                over = True
                try:
                    await race(self._wait_for_end(plane), stopped.wait())
                except Overtaken:
                    over = False
                await self._report(plane, over=over)
        return 0

    async def _wait_for_start(self) -> None:
        """Wait until the trainer has created the run's folder and opened the run on the server."""
        config = self._config
        limit_s = config.launch.ready_timeout_s
        self._report_progress(f"waiting for the trainer of {config.name}")
        deadline_s = time.monotonic() + limit_s
        while not await self._has_started():
            if time.monotonic() > deadline_s:
                raise RoleFailed(
                    f"no trainer has started the run {config.name} in {self._folder.path} and on {config.redis.url} "
                    f"within {limit_s:g} s (launch.ready_timeout_s). Start `async-grpo trainer` with the same "
                    "configuration, on a machine that has this folder"
                )
            await asyncio.sleep(POLL_EVERY_S)

    async def _has_started(self) -> bool:
        if not self._folder.config_file.exists():
            return False
        return await self._false_if_unreachable(run_exists(self._config.redis, self._config.name))

    def _is_finished(self) -> bool:
        return self._folder.read_state().finished_steps >= self._config.steps

    async def _connect(self, stack: AsyncExitStack) -> StatePlane:
        buffer = attach(self._config.redis, self._config.name)
        stack.push_async_callback(buffer.aclose)
        board = await connect_board(self._config.redis, self._config.name)
        stack.push_async_callback(board.aclose)
        return StatePlane(self._config, buffer, board, None)

    async def _wait_for_end(self, plane: StatePlane) -> None:
        """Wait, without a time limit, for the last step and its evaluation, then for the roles to exit."""
        self._report_progress(f"following {self._folder.path}; the report is written when the run is over")
        while not await self._false_if_unreachable(is_run_over(plane.config, plane.buffer, plane.board)):
            self._update_state()
            await asyncio.sleep(POLL_EVERY_S)

        deadline_s = time.monotonic() + self._config.launch.stop_timeout_s
        while await self._has_live_roles(plane):
            if time.monotonic() > deadline_s:
                return  # a role that is still exporting does not change the report
            await asyncio.sleep(POLL_EVERY_S)

    async def _has_live_roles(self, plane: StatePlane) -> bool:
        """True if a role holds its lock in this folder, or a rollout server on another machine still reports."""
        locks = (self._folder.path / "roles").glob("*.lock")
        if any(is_locked(lock) for lock in locks if lock.stem != ROLE):
            return True
        return bool(await plane.board.live_servers())

    async def _false_if_unreachable(self, query: Awaitable[bool]) -> bool:
        """Return the result of the query, or False while the server is unreachable; the roles wait for it too."""
        try:
            return await query
        except ServerLost as error:
            self._report_progress(f"waiting for the server: {error}")
            return False

    def _update_state(self) -> RunState:
        """Return the current state of the run. Also writes it to run.json every SAVE_EVERY_S."""
        now_s = time.monotonic()
        state = self._folder.read_state()
        state.wall_s = self._wall_before_s + now_s - self._started_s
        state.restarts = self._folder.count_restarts()
        if now_s - self._saved_s > SAVE_EVERY_S:
            self._saved_s = now_s
            self._folder.write_state(state)
        return state

    async def _report(self, plane: StatePlane, *, over: bool) -> None:
        state = self._update_state()
        state.finished_steps = self._config.steps if over else 0
        state.failure = "" if over else self._folder.find_role_failure()
        self._folder.write_state(state)
        summary = await write_results(plane, self._folder, state)
        await asyncio.to_thread(copy_results, self._config, self._folder, self._report_progress)
        self._report_progress(format_headline(summary, self._folder))
