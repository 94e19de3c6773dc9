"""`async-grpo run`: a run on this machine, from start to report.

    folder -> first policy -> server -> trainer and rollout servers -> summary.json, report.md, plots, timeline.json

    trainer     python -m trainer.node_main -> trainer.main, one process per rank -> trainer.loop.train
    rollout-i   python -m rollout_server.main

Start: the server first, because all roles need it, then trainer and rollout servers together. The trainer publishes
version 0, the rollout servers wait for it, and each role is ready when it reports to the run board. Stop: trainer and
rollout servers, then the report, then the server. Ctrl-C stops in the same order; a second Ctrl-C kills the roles.
When the run ends, for any reason, all of its processes end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from async_grpo.app.launch.first_policy import prepare_model, read_warmup_s
from async_grpo.app.launch.memory_plan import check_shared_memory
from async_grpo.app.launch.monitor import LocalProgress, Monitor
from async_grpo.app.launch.plan import RunPlan, check_with_policy
from async_grpo.app.launch.results import format_headline, write_results
from async_grpo.app.launch.role_process import assign_cores, available_cores, supervise_processes
from async_grpo.app.launch.role_specs import RoleSpecs, role_specs
from async_grpo.app.launch.run_copy import copy_results, fetch_run, remove_copy
from async_grpo.app.launch.run_folder import RunFolder, RunState, open_run, write_config
from async_grpo.app.launch.state_plane import StatePlane, check_fresh, open_state_plane
from async_grpo.app.report.live_view import LiveView
from async_grpo.config import RunConfig
from async_grpo.errors import AsyncGrpoError, BufferFault, ConfigError, RoleFailed
from async_grpo.telemetry.logging import bind_process, redact_secrets
from async_grpo.utils.aio import Overtaken, cancel_and_wait, race, stop_signals
from async_grpo.utils.child_process import adopt_orphans
from buffer import is_run_over

INTERRUPTED = 130
"""Exit code of a run that Ctrl-C or SIGTERM has stopped."""


async def run_locally(
    plan: RunPlan, *, fresh: bool, command: str, confirm: Callable[[str], bool] = lambda question: False
) -> int:
    """Start or resume the run and wait for its end. Returns the exit code: 0 trained, 130 interrupted.

    Args:
        plan: The run, with its inputs on this machine.
        fresh: Delete an earlier run of this name first.
        command: Command line of the user, for the report; "" keeps that of an earlier invocation.
        confirm: Called before `fresh` deletes a run from a shared server, or the copy of another run.

    Raises ConfigError for a run that cannot be started here, before anything is written or started; RoleFailed if a
    role fails more often than it may be restarted, ServerLost if the embedded server cannot be started again.
    """
    config = plan.config
    _check_one_machine(config)
    assign_cores(config, available_cores())
    bind_process(run=config.name)
    adopt_orphans()

    # Both branches come before the folder is opened. With `fresh`, `open_run` deletes the earlier folder, and only its
    # id shows whether the run on a shared server or in a bucket is this one or a colleague's. Otherwise, a bare machine
    # must first get the folder from the bucket, or the run would start from the beginning.
    if fresh:
        await check_fresh(config, confirm)
        await remove_copy(config, confirm)
    else:
        await asyncio.to_thread(fetch_run, config, print)

    folder = open_run(config, fresh=fresh)
    state = folder.read_state()
    interrupted = asyncio.Event()
    with folder.locked(), LiveView(config, Console()) as view, stop_signals(interrupted.set):
        if state.finished_steps >= config.steps:
            view.print_message(_finished_message(folder, state))
            return 0
        try:
            # Generating the first policy may take minutes and all cores. It comes before the server and the roles, so
            # that none of them times out while waiting, and Ctrl-C has nothing to stop.
            started_s = time.monotonic()
            model = await race(_prepare_policy(plan, view.show_phase), interrupted.wait())
            state.prepare_s = max(state.prepare_s, time.monotonic() - started_s, read_warmup_s(model))
            if command:
                state.command = command
            state.failure = ""

            async with AsyncExitStack() as stack:
                # The roles communicate through the server, and the report reads it after they have exited. So it
                # starts before them, and the stack stops it after the report.
                url = config.redis.url
                view.show_phase("starting the server" if url is None else f"connecting to {redact_secrets(url)}")
                opening = stack.enter_async_context(open_state_plane(plan.inputs, folder, fresh=fresh))
                plane = await race(opening, interrupted.wait())

                # Roles read their configuration from the folder. The address of an embedded server is known only now.
                write_config(folder, config, for_roles=plane.config)
                roles = role_specs(plane.config, folder, model)
                if await is_run_over(plane.config, plane.buffer, plane.board):
                    # The run was stopped after its last evaluation. The trainer still has to read the results and
                    # export the model, but there is nothing left to generate.
                    roles = roles.without_servers()
                await LocalRun(plane, folder, state, view, roles).run_to_report(interrupted)
        except Overtaken:
            view.print_message("stopped; the same command resumes")
            return INTERRUPTED
    return 0


async def _prepare_policy(plan: RunPlan, report_progress: Callable[[str], None]) -> Path:
    """Generate or find the first policy, then run the checks that need its tokenizer and size. Raises ConfigError."""
    model = await prepare_model(plan.inputs, report_progress)
    if plan.config.model.path is None:
        await asyncio.to_thread(check_with_policy, plan.inputs, model)
    check_shared_memory(plan.config, model)
    return model


def _finished_message(folder: RunFolder, state: RunState) -> str:
    """Return a message with the commands that continue or repeat a finished run."""
    return (
        f"this run is finished: see {folder.path / 'report.md'}. To train it further: `async-grpo resume {folder.path} "
        f"--steps N` (above {state.finished_steps}). To start over: `async-grpo run` with --fresh. To continue from "
        "its weights with other values, such as trainer.optimizer.lr: `async-grpo run` with -o name=... "
        f"-o model.path={folder.path / 'checkpoints' / 'hf'}"
    )


def _check_one_machine(config: RunConfig) -> None:
    nodes = config.trainer.nodes
    if nodes > 1:
        raise ConfigError(
            f"trainer.nodes is {nodes}, but `async-grpo run` starts all roles on this machine. Set redis.url and start "
            f"`async-grpo trainer CONFIG --node-rank R` on each of the {nodes} nodes (R from 0) and `async-grpo "
            "rollout CONFIG --name NAME` for each rollout server; or set trainer.nodes to 1. See "
            "docs/several-machines.md"
        )


class LocalRun:
    """Roles of one invocation, from their start to the report."""

    def __init__(self, plane: StatePlane, folder: RunFolder, state: RunState, view: LiveView, roles: RoleSpecs) -> None:
        self._plane = plane
        self._folder = folder
        self._state = state
        self._view = view
        self._started_s = time.monotonic()
        self._wall_before_s = state.wall_s
        self._progress = LocalProgress(plane, view.print_message)
        self._supervisor = supervise_processes(
            plane.config.name,
            [roles.trainer, *roles.servers],
            spares=roles.spares,
            restarts=state.restarts,
            warn=view.warn,
            stop_timeout_s=plane.config.launch.stop_timeout_s,
            progress=self._progress,
        )
        self._monitor = Monitor(
            plane,
            self._supervisor,
            self._progress,
            show=view.update,
            report_progress=view.print_message,
            warn=view.warn,
        )
        self._roles: asyncio.Task[None] | None = None

    async def run_to_report(self, interrupted: asyncio.Event) -> None:
        """Run until the last step, an error or Ctrl-C, then stop the roles and write the report.

        Raises RoleFailed, ServerLost, and Overtaken after Ctrl-C.
        """
        self._view.show_phase(f"starting {', '.join(self._supervisor.states)}")
        self._view.show_phase("")  # from now on the live view shows the stage of each role
        try:
            await race(self._watch_roles(), interrupted.wait())
            self._state.finished_steps = self._plane.config.steps
        except AsyncGrpoError as error:
            self._state.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            # The report comes after the roles have exited. Before that, their last rows, their timelines and the
            # counters are incomplete. The event is cleared so that a second Ctrl-C is noticed.
            interrupted.clear()
            self._view.show_phase("stopping")
            await self._stop_roles(interrupted)
            self._view.print_last_state()
            await self._report(failed=sys.exc_info()[0] is not None)

    async def _watch_roles(self) -> None:
        """Wait until all roles have ended. Raises the first error of a role or of the monitor."""
        self._roles = asyncio.create_task(self._supervisor.watch())
        monitors = [asyncio.create_task(self._monitor.watch()), asyncio.create_task(self._monitor.keep_server_alive())]
        try:
            done, _ = await asyncio.wait({self._roles, *monitors}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel_and_wait(*monitors)

        await self._monitor.poll()
        if not await self._progress.is_trained():
            raise RoleFailed(
                f"all roles have exited, but the last step is not trained. See the logs in {self._folder.path}/logs"
            )

    async def _stop_roles(self, interrupted_again: asyncio.Event) -> None:
        """Send SIGTERM and wait; after a second Ctrl-C, kill. Afterwards no role runs or is about to start."""
        stopping = asyncio.create_task(self._supervisor.stop())
        try:
            await race(stopping, interrupted_again.wait())
        except Overtaken:
            self._supervisor.kill()
            await stopping
        if self._roles is not None:
            await asyncio.gather(self._roles, return_exceptions=True)  # its error, if any, is being raised already

    async def _report(self, *, failed: bool) -> None:
        """Write run.json and the report, and print its headline.

        After a failed run, an error of the report is only printed: the run's own error is more important.
        """
        try:
            self._state.wall_s = self._wall_before_s + time.monotonic() - self._started_s
            self._state.restarts |= self._supervisor.restarts
            self._state.given_up |= self._supervisor.given_up
            self._folder.write_state(self._state)
            self._view.show_phase("writing the report")
            summary = await write_results(self._plane, self._folder, self._state)
            await asyncio.to_thread(copy_results, self._plane.config, self._folder, self._view.print_message)
            self._view.print_message(format_headline(summary, self._folder))
        except (BufferFault, OSError) as error:
            if not failed:
                raise
            self._view.print_message(f"no report could be written: {error}")
