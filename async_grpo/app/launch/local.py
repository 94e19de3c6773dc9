"""`async-grpo run`: everything of one run on this machine.

    folder -> first policy -> server -> trainer and rollout servers -> summary.json, report.md, plots, timeline.json

Start: the server first, because everyone needs it, then trainer and rollout servers at once. The trainer publishes
version 0, the rollout servers wait for it, and each role is ready when it says so on the run board. Stop: trainer and
rollout servers, then the report, then the server. Ctrl-C stops in the same order; a second Ctrl-C does not wait. When
the run ends, for any reason, all of its processes end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from async_grpo.app.launch.first_policy import made_in_s, prepare_model
from async_grpo.app.launch.inputs import fetch
from async_grpo.app.launch.memory_plan import check_shared_memory
from async_grpo.app.launch.monitor import Monitor
from async_grpo.app.launch.plan import check_with_policy
from async_grpo.app.launch.role_process import RoleSpec, cores_here, role_cores
from async_grpo.app.launch.role_specs import role_specs
from async_grpo.app.launch.run_copy import copy_results, fetch_run, remove_copy
from async_grpo.app.launch.run_folder import RunFolder, RunState, open_run, write_config
from async_grpo.app.launch.state_plane import StatePlane, check_fresh, open_state_plane
from async_grpo.app.launch.supervisor import TRAINER, RoleSupervisor
from async_grpo.app.report.live_view import LiveView
from async_grpo.app.report.run_report import write_report
from async_grpo.app.report.summary import learned, summarize
from async_grpo.config import RunConfig
from async_grpo.errors import AsyncGrpoError, BufferFault, ConfigError, RoleFailed, ServerLost
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.logging import bind_process, redact_secrets
from async_grpo.telemetry.rows import RESTARTS_PREFIX, rows_of_kind
from async_grpo.telemetry.timeline import merge_timelines
from async_grpo.telemetry.trackers import make_trackers
from async_grpo.utils.aio import Overtaken, cancel_and_wait, race, stop_signals
from async_grpo.utils.child_process import adopt_orphans
from buffer import BufferStats, is_over

INTERRUPTED = 130
"""Exit code of a run that Ctrl-C or SIGTERM has stopped."""
EXPIRE_TIMEOUT_S = 2.0
"""Seconds that the restart of a dead server may wait for the buffer."""


async def write_results(plane: StatePlane, folder: RunFolder, state: RunState, stats: BufferStats) -> dict[str, Any]:
    """Write summary.json, report.md with its plots, and timeline.json; returns the summary. Safe to repeat."""
    rows = read_rows(folder.path / "metrics.jsonl")
    restarts = {f"{RESTARTS_PREFIX}{role}": count for role, count in state.restarts.items()}
    evaluations = await plane.board.evaluations()
    summary = summarize(
        plane.config,
        rows_of_kind(rows, "step"),
        rows_of_kind(rows, "probe"),
        evaluations,
        {**asdict(stats), "active": stats.active},
        {**await plane.board.counters(), **restarts},
        state.wall_s,
        prepare_s=state.prepare_s,
        servers=[read_rows(path) for path in sorted((folder.path / "timeline").glob("rollout-*.jsonl"))],
        given_up=state.given_up,
    )
    trackers = make_trackers(plane.config)
    for evaluation in evaluations:
        trackers.evaluation(evaluation)
    await asyncio.to_thread(merge_timelines, folder.path)
    trackers.attach([await asyncio.to_thread(write_report, folder.path, summary)])
    await asyncio.to_thread(trackers.close)
    return summary


def headline(summary: dict[str, Any], folder: RunFolder) -> str:
    """The result of a run in a few lines."""
    if not summary["steps"]:
        return f"nothing was trained: no step was finished\nreport: {folder.path / 'report.md'}"
    groups = ", ".join(f"{reason} {count}" for reason, count in summary["groups"].items() if count)
    noted = ", ".join(summary["engine_notes"])
    lines = [
        f"steps {summary['steps']}, tokens: {summary['generated_tokens']} made, {summary['trained_tokens']} trained",
        learned(summary),
        summary["bottleneck"],
        f"age of trained tokens: max {summary['max_age']} (bound {summary['age_bound']})",
        f"groups: {groups}; balanced: {'yes' if summary['balanced'] else 'NO'}",
        f"went on without {', '.join(summary['given_up'])}: the report says why" if summary["given_up"] else "",
        f"without captured graphs: {noted}; the report says why" if noted else "",
        f"report: {folder.path / 'report.md'}",
    ]
    return "\n".join(line for line in lines if line)


class LocalLauncher:
    """Launches on this machine alone, without any files of its own."""

    def __init__(self, confirm: Callable[[str], bool]) -> None:
        """`confirm` is asked before `fresh` deletes a run from a shared server, or the copy of another run."""
        self._confirm = confirm

    def render(self, config: RunConfig) -> Mapping[Path, str]:
        """{}: the roles are started directly."""
        return {}

    async def launch(self, config: RunConfig, *, fresh: bool, command: str) -> int:
        """Run or resume; see `Launcher`."""
        _check_one_machine(config)
        bind_process(run=config.name)
        role_cores(config, cores_here())  # checked now, read again when the roles start
        adopt_orphans()
        if fresh:
            await check_fresh(config, self._confirm)
            await remove_copy(config, self._confirm)
        else:
            await asyncio.to_thread(fetch_run, config, print)
        folder = open_run(config, fresh=fresh)
        state = folder.read_state()
        interrupted = asyncio.Event()
        with folder.locked(), LiveView(config, Console()) as view, stop_signals(interrupted.set):
            if state.finished_steps >= config.steps:
                view.say(_finished(folder, state))
                return 0
            try:
                began_s = time.monotonic()
                local = await race(asyncio.to_thread(fetch, config, view.phase), interrupted.wait())
                model = await race(prepare_model(local, view.phase), interrupted.wait())
                if config.model.path is None:
                    await race(asyncio.to_thread(check_with_policy, local, model), interrupted.wait())
                check_shared_memory(config, model)
                state.prepare_s = max(state.prepare_s, time.monotonic() - began_s, made_in_s(model))
                url = config.redis.url
                view.phase("starting the server" if url is None else f"connecting to {redact_secrets(url)}")
                async with AsyncExitStack() as stack:
                    opening = stack.enter_async_context(open_state_plane(local, folder, fresh=fresh))
                    plane = await race(opening, interrupted.wait())
                    write_config(folder, config, for_roles=plane.config)
                    over = await is_over(plane.config, plane.buffer, plane.board)
                    specs = [
                        spec for spec in role_specs(plane.config, folder, model) if not over or spec.name == TRAINER
                    ]  # a resumed run may have nothing left for rollout servers to do
                    await LocalRun(plane, folder, specs, view, state, command).go(interrupted)
            except Overtaken:
                view.say("stopped; the same command resumes")
                return INTERRUPTED
        return 0


def _finished(folder: RunFolder, state: RunState) -> str:
    """Commands that continue or repeat a finished run."""
    return (
        f"this run is finished: see {folder.path / 'report.md'}. To train it further: `async-grpo resume {folder.path} "
        f"--steps N` (above {state.finished_steps}). To start over: `async-grpo run` with --fresh. To go on from its "
        f"weights with other values, such as trainer.optimizer.lr: `async-grpo run` with -o name=... "
        f"-o model.path={folder.path / 'checkpoints' / 'hf'}"
    )


def _check_one_machine(config: RunConfig) -> None:
    nodes = config.trainer.nodes
    if nodes > 1:
        raise ConfigError(
            f"trainer.nodes is {nodes}, but `async-grpo run` starts everything on this machine. Set redis.url, and "
            f"start `async-grpo trainer CONFIG --node-rank R` on each of the {nodes} (R from 0), and `async-grpo "
            "rollout CONFIG --name NAME` where servers are to be; or set trainer.nodes to 1. See docs/operations.md"
        )


class LocalRun:
    """The roles of one invocation, from their start to the report."""

    def __init__(
        self,
        plane: StatePlane,
        folder: RunFolder,
        specs: list[RoleSpec],
        view: LiveView,
        state: RunState,
        command: str,
    ) -> None:
        self._plane, self._folder, self._view, self._state = plane, folder, view, state
        self._started_s = time.monotonic()
        self._wall_before_s = state.wall_s
        self._state.command, self._state.failure = command or self._state.command, ""
        self._supervisor = RoleSupervisor(
            plane.config.name,
            specs[: 1 + plane.config.rollout.servers],
            spares=specs[1 + plane.config.rollout.servers :],
            restarts=state.restarts,
            say=view.say,
            warn=view.warn,
            stop_timeout_s=plane.config.launch.stop_timeout_s,
            trained=lambda: self._monitor.trained(),
            generated=self._generated,
            expire_leases=self._expire_leases,
        )
        self._monitor = Monitor(plane, self._supervisor, show=view.update, say=view.say, warn=view.warn)
        self._roles: asyncio.Task[None] | None = None

    async def go(self, interrupted: asyncio.Event) -> None:
        """Run until the last step, an error or Ctrl-C, then stop the roles and write the report.

        Raises RoleFailed, ServerLost, and Overtaken after Ctrl-C.
        """
        self._view.phase(f"starting {', '.join(self._supervisor.states)}")
        self._view.phase("")  # from now on the state says what each role does
        try:
            await race(self._watch(), interrupted.wait())
            self._state.finished_steps = self._plane.config.steps
        except AsyncGrpoError as error:
            self._state.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            interrupted.clear()
            self._view.phase("stopping")
            await self._stop(interrupted)
            self._view.print_last_state()
            await self._report(failed=sys.exc_info()[0] is not None)

    async def _watch(self) -> None:
        """Wait until all roles have ended. Raises the first error of a role or of the monitor."""
        self._roles = asyncio.create_task(self._supervisor.watch())
        looks = [asyncio.create_task(self._monitor.watch()), asyncio.create_task(self._monitor.keep_server())]
        try:
            done, _ = await asyncio.wait({self._roles, *looks}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            await cancel_and_wait(*looks)
        await self._monitor.look()
        if not self._monitor.trained():
            raise RoleFailed(f"all roles have left, but the run is not trained to its end: {self._folder.path}/logs")

    async def _generated(self) -> bool:
        """Whether rollout servers have nothing left to do; False if the server of the buffer cannot be asked."""
        try:
            return self._monitor.trained() and await is_over(self._plane.config, self._plane.buffer, self._plane.board)
        except ServerLost:
            return False  # a role that comes back needlessly leaves by itself

    async def _expire_leases(self, name: str) -> None:
        """Let others go on with the groups of a dead server. Without an answer, its leases run out by themselves."""
        try:
            async with asyncio.timeout(EXPIRE_TIMEOUT_S):
                await self._plane.buffer.expire_leases(name, life=round(1000 * time.time()))
        except (BufferFault, TimeoutError) as error:
            reason = str(error) or "the buffer does not answer"
            reason = str(error) or "the buffer does not answer"
            self._view.say(f"the leases of {name} run out by themselves: {reason}")

    async def _stop(self, again: asyncio.Event) -> None:
        """Send SIGTERM and wait; after a second Ctrl-C (`again`), kill. No role is left, or about to start."""
        stopping = asyncio.create_task(self._supervisor.stop())
        try:
            await race(stopping, again.wait())
        except Overtaken:
            self._supervisor.kill()
            await stopping
        if self._roles is not None:
            await asyncio.gather(self._roles, return_exceptions=True)  # its error, if any, is on its way already

    async def _report(self, *, failed: bool) -> None:
        """Write run.json and the report, and print its headline. After a failed run, a report that cannot be written
        does not hide the run's own error."""
        try:
            self._state.wall_s = self._wall_before_s + time.monotonic() - self._started_s
            self._state.restarts |= self._supervisor.restarts
            self._state.given_up |= self._supervisor.given_up
            self._folder.write_state(self._state)
            stats = await self._plane.buffer.stats()
            self._view.phase("writing the report")
            summary = await write_results(self._plane, self._folder, self._state, stats)
            await asyncio.to_thread(copy_results, self._plane.config, self._folder, self._view.say)
            self._view.say(headline(summary, self._folder))
        except (BufferFault, OSError) as error:
            if not failed:
                raise
            self._view.say(f"no report could be written: {error}")
