"""Supervisor: starts the roles of a run, watches them, restarts them or gives up, and stops them in order.

    watch():         start each role in its own task, which waits for the role's end. Returns when all roles have ended;
                     raises if the run cannot continue without one. No start order: each role waits for its inputs
    start_spare(), retire_server():  add or remove one server; a removed server returns its groups to the buffer
    give_up_role():  stop a server that does not become ready; the run continues with the others
    stop():          SIGTERM to all roles (rollout servers store partials, the trainer saves a checkpoint), SIGKILL to
                     those that still run at the deadline

States of a role:

    starting -> running      `mark_ready`
    starting, running ->
        restarting           it ended and is needed; `starting` once it has been started again
        finished             it exited and is not needed any more
        stopped              it exited with an error while the supervisor was stopping the run
        failed               it ended too often, or was not ready in time

A `RoleRunner` runs a role: as a process on this machine (`ProcessRunner`) or as actors of a Ray cluster (`RayRunner`).
`decide_restart` is the restart policy for both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from async_grpo.app.report.live_state import RoleState, Warn
from async_grpo.errors import EXIT_CONFIG, AsyncGrpoError, RoleFailed, WaitTimeout
from async_grpo.utils.child_process import signal_name

TRAINER = "trainer"
"""Name of the trainer's role; all other roles are rollout servers."""
ACTIVE = ("starting", "running", "restarting")
"""States of a role that runs or is about to run."""


@dataclass(frozen=True, slots=True)
class RoleEnd:
    """How a role has ended."""

    code: int
    """Exit code; -N after signal N."""
    explanation: str
    is_moved: bool = False
    """True if it was stopped because its machine is being drained. It is started elsewhere, and this does not count as
    a restart."""


class RoleRunner(Protocol):
    """Runs one role, and can start it again after it has ended."""

    @property
    def name(self) -> str:
        """Name of the role."""
        ...

    @property
    def max_restarts(self) -> int:
        """Maximum restarts after failures in this invocation."""
        ...

    @property
    def waits_for_room(self) -> bool:
        """True while `start` waits for a machine. `stop` then cancels the start."""
        ...

    @property
    def pid(self) -> int | None:
        """PID of the role's process on this machine; None if there is none."""
        ...

    async def start(self) -> None:
        """Start the role; on a cluster, wait for room first. Raises WaitTimeout.

        If `stop` ends that wait, it returns without having started anything, and `wait` returns immediately.
        """
        ...

    async def wait(self) -> RoleEnd:
        """Wait until the role and all of its processes have ended."""
        ...

    def stop(self) -> None:
        """Send SIGTERM: the role saves its work and exits."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...

    def stage(self) -> str:
        """Return the stage of its start; "" if unknown."""
        ...


class RunProgress:
    """Progress of the run, as the supervisor needs it. This default has no information: a role that exits with 0 is
    done."""

    async def is_trained(self) -> bool:
        """True if the last step has been trained."""
        return True

    async def is_generated(self) -> bool:
        """True if rollout servers have nothing left to do."""
        return False

    async def expire_leases(self, server: str) -> None:
        """Return the groups of a dead rollout server to the buffer. This default does nothing: the groups return when
        the server's leases expire."""


class RestartDecision(Enum):
    """Action after the end of a role."""

    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give up"


def decide_restart(
    *, code: int, stopping: bool, over: bool, needed: bool, restarts: int, limit: int
) -> RestartDecision:
    """Decide whether a role that has ended is restarted.

    Args:
        code: Exit code of the role.
        stopping: True if the supervisor has stopped it.
        over: True if nothing is left for this role to do; any end is then final.
        needed: True if the run cannot finish without this role. Only read after exit code 0: a role that has failed
            is always restarted.
        restarts: Restarts so far in this invocation.
        limit: Maximum restarts per invocation.

    Exit code 0 means that the role left on purpose: it is restarted only if the run still needs it. EXIT_CONFIG means
    that it would fail the same way again.
    """
    left_on_purpose = code == 0 and not needed
    if stopping or over or left_on_purpose:
        return RestartDecision.DONE
    if restarts < limit and code != EXIT_CONFIG:
        return RestartDecision.RESTART
    return RestartDecision.GIVE_UP


class Supervisor:
    """Starts, restarts and stops the roles of a run that belong to this command."""

    def __init__(
        self,
        runners: Sequence[RoleRunner],
        *,
        spares: Sequence[RoleRunner] = (),
        restarts: dict[str, int],
        warn: Warn,
        stop_timeout_s: float,
        progress: RunProgress | None = None,
        sees_whole_run: bool = True,
        end_leftovers: Callable[[], object] = lambda: None,
    ) -> None:
        """Args:
        runners: Roles that `watch` starts.
        spares: Servers that are started on demand.
        restarts: Restarts in earlier invocations, by role.
        warn: Receives a message for each role that has failed.
        stop_timeout_s: Seconds from SIGTERM to SIGKILL.
        progress: Progress of the run, for decisions about restarts.
        sees_whole_run: False in a command that runs only some roles of the run. It cannot know which servers are left
            or ready, so a role that exits with 0 is not restarted, and a server that is starting counts as running.
        end_leftovers: Called after all roles have ended, to end processes that they shared.
        """
        self._runners = {runner.name: runner for runner in (*runners, *spares)}
        self._initial = [runner.name for runner in runners]
        self._spares = [runner.name for runner in spares]
        self._warn = warn
        self._stop_timeout_s = stop_timeout_s
        self._progress = progress or RunProgress()
        self._sees_whole_run = sees_whole_run
        self._end_leftovers = end_leftovers
        self._stopping = False
        self._retired: set[str] = set()
        self.given_up: dict[str, str] = {}
        """Rollout server that was given up -> reason."""
        self._tasks: asyncio.TaskGroup | None = None
        self._ends: dict[str, asyncio.Future[RoleEnd]] = {}
        """Role that has been started -> future with its end."""
        self._started_s: dict[str, float] = {}
        self.states = {name: RoleState(name, "starting", restarts.get(name, 0)) for name in self._initial}

    async def watch(self) -> None:
        """Start all roles and wait until they have ended.

        Raises RoleFailed if the run cannot continue without a role that has failed; WaitTimeout if the cluster has no
        room for such a role.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = group
                for name in self._initial:
                    group.create_task(self._run_with_restarts(self._runners[name]), name=f"run {name}")
        except* AsyncGrpoError as failures:
            raise failures.exceptions[0] from None

    def start_spare(self) -> str | None:
        """Start the first idle spare server and return its name; None if there is none or the run is ending."""
        idle = [name for name in self._spares if not self.is_active(name) and name not in self.given_up]
        if not idle or self._tasks is None or self._is_ending():
            return None

        name = idle[0]
        self._retired.discard(name)
        restarts = self.states[name].restarts if name in self.states else 0
        self.states[name] = RoleState(name, "starting", restarts)
        self._tasks.create_task(self._run_with_restarts(self._runners[name]), name=f"run {name}")
        return name

    def retire_server(self, name: str) -> None:
        """Stop a spare server: it stores its partials and returns its groups. `start_spare` may start it again."""
        if self._tasks is not None and not self._is_ending() and name in self._spares and self.is_active(name):
            self._retired.add(name)
            self._tasks.create_task(self._terminate(name), name=f"retire {name}")

    def give_up_role(self, name: str, why: str) -> None:
        """Stop a rollout server permanently; the run continues with the others.

        Raises RoleFailed with the message `why` if it is the trainer or the last server.
        """
        self._give_up_or_fail(name, why, self._other_servers(name, ACTIVE))
        if self._tasks is not None and not self._stopping:
            self._tasks.create_task(self._terminate(name), name=f"give up {name}")

    def can_retire(self, name: str) -> bool:
        """True if the role is a spare server that is not retired yet."""
        return name in self._spares and name not in self._retired

    def is_active(self, name: str) -> bool:
        """True if the role runs or is about to run."""
        return name in self.states and self.states[name].state in ACTIVE

    def mark_ready(self, name: str) -> float | None:
        """Record that the role is ready. Returns the seconds that its start took; None if it was not starting."""
        role = self.states[name]
        if role.state != "starting" or name not in self._ends:
            return None
        self.states[name] = replace(role, state="running")
        return time.monotonic() - self._started_s[name]

    def live_states(self, usual_s: Callable[[str], float | None]) -> list[RoleState]:
        """Return the states of all roles, with stage and duration of the start for those that are starting."""
        states = []
        for name, role in self.states.items():
            if role.state == "starting" and name in self._ends:
                age_s = time.monotonic() - self._started_s[name]
                role = replace(role, stage=self._runners[name].stage(), since_s=age_s, usual_s=usual_s(name))
            states.append(role)
        return states

    def pid(self, name: str) -> int | None:
        """PID of the role's process; None if it does not run on this machine."""
        return self._runners[name].pid

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by role, including earlier invocations of this run."""
        return {name: state.restarts for name, state in self.states.items()}

    async def stop(self) -> None:
        """Send SIGTERM to all roles, SIGKILL to those that still run after the timeout, and end their leftover
        processes. Idempotent."""
        self._stopping = True
        for runner in self._runners.values():
            runner.stop()

        ends = dict(self._ends)
        if ends:
            await asyncio.wait(ends.values(), timeout=self._stop_timeout_s)
            for name, end in ends.items():
                if not end.done():
                    self._runners[name].kill()
            await asyncio.gather(*ends.values())

        # Only now: a role that still runs may need the processes that it shares with others.
        await asyncio.to_thread(self._end_leftovers)

    def kill(self) -> None:
        """Send SIGKILL to all roles immediately. `stop` then returns without waiting."""
        self._stopping = True  # or they would be restarted
        for runner in self._runners.values():
            runner.kill()

    async def _run_with_restarts(self, runner: RoleRunner) -> None:
        """Run the role, and restart it as long as `decide_restart` allows it."""
        name = runner.name
        restarts_used = 0
        while not self._stopping and name not in self.given_up:
            try:
                end = await self._run_once(runner)
            except WaitTimeout as error:
                if not self._is_wanted(name):
                    break  # retired or given up while it waited for room: that is no failure
                others = self._other_servers(name, ACTIVE)
                if name == TRAINER or not others:
                    raise
                self._give_up_or_fail(name, str(error), others)
                return

            if end.is_moved and self._is_wanted(name):
                self._set_state(name, "restarting")
                self._warn(f"{end.explanation}; it is started elsewhere")
                continue

            if end.code and name != TRAINER and not self._stopping:
                # A server that died has not returned its groups. Without this, no other server would continue them
                # until their leases expire. While the run stops, no other server would take them.
                await self._progress.expire_leases(name)

            # The trainer is never over: after its last step it still exports the model.
            is_over = name != TRAINER and not self._stopping and await self._progress.is_generated()
            is_needed = end.code == 0 and await self._is_needed(name)
            decision = decide_restart(
                code=end.code,
                stopping=not self._is_wanted(name),  # read after the two awaits, during which `stop` may be called
                over=is_over,
                needed=is_needed,
                restarts=restarts_used,
                limit=runner.max_restarts,
            )
            if decision is RestartDecision.DONE:
                self._finish(name, end)
                return
            if decision is RestartDecision.GIVE_UP:
                # After a configuration error only servers that already run count: one that is still starting reads
                # the same configuration and would fail the same way.
                counted = ("running",) if end.code == EXIT_CONFIG and self._sees_whole_run else ACTIVE
                others = self._other_servers(name, counted)
                reason = _explain_no_restart(end.code, restarts_used, runner.max_restarts)
                self._give_up_or_fail(name, f"{end.explanation}. {reason}", others)
                return

            restarts_used += 1
            self.states[name] = RoleState(name, "restarting", self.states[name].restarts + 1)
            self._warn(
                f"{end.explanation}; restart {restarts_used} of {runner.max_restarts}",
                failed_role=name,
                **_exit_fields(end.code),
                restart=restarts_used,
                restart_limit=runner.max_restarts,
            )

        # It was stopped between two starts.
        if name not in self.given_up:
            self._set_state(name, "finished")

    async def _run_once(self, runner: RoleRunner) -> RoleEnd:
        """Start the role and wait for its end."""
        name = runner.name
        await runner.start()
        self._started_s[name] = time.monotonic()
        self._ends[name] = asyncio.ensure_future(runner.wait())
        if name not in self.given_up:  # the state of a role that was given up stays `failed`
            self._set_state(name, "starting")
        if not self._is_wanted(name):
            # The role was stopped, retired or given up while it was starting, before there was a process to signal.
            await self._terminate(name)

        # Shielded, and removed only after the end: if this task is cancelled, the role still runs, and `stop` must
        # find its end here to wait for it.
        end = await asyncio.shield(self._ends[name])
        del self._ends[name]
        return end

    def _finish(self, name: str, end: RoleEnd) -> None:
        if name not in self.given_up:
            self._set_state(name, "stopped" if end.code and self._stopping else "finished")
        if name == TRAINER:
            # The run is over. Servers still waiting for room would wait in vain.
            for runner in self._runners.values():
                if runner.waits_for_room:
                    runner.stop()

    async def _terminate(self, name: str) -> None:
        """Send SIGTERM to a role, then SIGKILL after the timeout."""
        self._runners[name].stop()  # also ends the wait for room on a cluster
        end = self._ends.get(name)
        if end is None:
            return  # it is starting, or between two starts: `_run_once` terminates it after that
        await asyncio.wait([end], timeout=self._stop_timeout_s)
        if not end.done():
            self._runners[name].kill()

    def _give_up_or_fail(self, name: str, why: str, others: Sequence[str]) -> None:
        """Continue without a server. Raises RoleFailed if it is the trainer or has no `others` beside it."""
        self._set_state(name, "failed")
        if name == TRAINER or not others:
            raise RoleFailed(f"{why}; the same command resumes the run")
        self.given_up[name] = why
        self._warn(
            f"{why}. The run continues without {name}, with {', '.join(others)}",
            level="error",
            failed_role=name,
            given_up=True,
        )

    def _other_servers(self, name: str, states: Sequence[str]) -> list[str]:
        """Return the other rollout servers that are in one of these states."""
        return [role.name for role in self.states.values() if role.name not in (TRAINER, name) and role.state in states]

    def _is_wanted(self, name: str) -> bool:
        return not (self._stopping or name in self._retired or name in self.given_up)

    def _is_ending(self) -> bool:
        return self._stopping or not self.is_active(TRAINER)

    async def _is_needed(self, name: str) -> bool:
        """True for the trainer until all steps are trained, and for the last rollout server until the trainer has
        finished."""
        if not self._sees_whole_run:
            return False
        if name == TRAINER:
            return not await self._progress.is_trained()
        return not self._other_servers(name, ACTIVE) and self.states[TRAINER].state != "finished"

    def _set_state(self, name: str, state: str) -> None:
        self.states[name] = replace(self.states[name], state=state)


def _exit_fields(code: int) -> dict[str, Any]:
    """Return the log fields that describe how a role has ended."""
    if code < 0:
        return {"signal": signal_name(-code)}
    return {"exit_code": code}


def _explain_no_restart(code: int, used: int, limit: int) -> str:
    if code == EXIT_CONFIG:
        return "It is not restarted, because it would fail again. Correct the setting that it names"
    return f"It is not restarted again: {used} of {limit} restarts are used up in this invocation. See its log"
