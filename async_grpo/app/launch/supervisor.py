"""Supervisor: starts the roles of a run, watches them, restarts them or gives up, and stops them in order.

    watch():         starts every role (each waits by itself for what it needs) in a task of its own, which waits for
                     its end. Returns when all have ended, or raises when the run cannot continue without one
    start_spare(), retire_server():  add or remove one server; a removed server returns its groups to the buffer
    give_up_role():  stop a server that does not become ready; the run continues with the others
    stop():          SIGTERM to all roles (rollout servers store partials, the trainer saves a checkpoint), SIGKILL to
                     those that are still there at the deadline

A role is starting until `mark_ready`, then running; after its end it is restarting, finished, stopped or failed:

    starting -> running -> restarting -> starting ...
        |          |-> finished   it left, and the run needs it no more
        |          |-> stopped    the supervisor asked for it
        +----------+-> failed     it ended too often, or was not ready in time

A `RoleRunner` is where a role runs: a process of this machine (`ProcessRunner`) or actors of a Ray cluster
(`RayRunner`). `decide` is the policy of restarts for both.
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
"""The name of the trainer's role; all others are rollout servers."""
ACTIVE = ("starting", "running", "restarting")
"""States of a role that runs, or is about to."""


@dataclass(frozen=True, slots=True)
class RoleEnd:
    """How a role has ended."""

    code: int
    """Exit code; -N: killed by signal N."""
    explanation: str
    is_moved: bool = False
    """True if it was stopped because its machine leaves: it is started elsewhere, which costs no restart."""


class RoleRunner(Protocol):
    """Runs one role, one start after the other."""

    @property
    def name(self) -> str:
        """Name of the role."""
        ...

    @property
    def restarts(self) -> int:
        """How often the role may be started again in this invocation after it has died."""
        ...

    @property
    def waits_for_room(self) -> bool:
        """True while `start` waits for a machine; `stop` then ends it without a start."""
        ...

    @property
    def pid(self) -> int | None:
        """PID of the role's process on this machine; None if there is none."""
        ...

    async def start(self) -> None:
        """Start the role; waits for room on a cluster. Raises WaitTimeout."""
        ...

    async def wait(self) -> RoleEnd:
        """Wait until the role has ended and nothing of it is left."""
        ...

    def stop(self) -> None:
        """Send SIGTERM: the role finishes what it must and ends."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...

    def stage(self) -> str:
        """The stage of its start; "" if unknown."""
        ...


class RunProgress:
    """The supervisor's view of its run. This default has none: a role that ends with 0 is done."""

    async def is_trained(self) -> bool:
        """True if the last step has been trained."""
        return True

    async def is_generated(self) -> bool:
        """True if rollout servers have nothing left to do."""
        return False

    async def expire_leases(self, server: str) -> None:
        """Return the groups of a dead rollout server to the others. Here they wait until its leases expire."""


class RestartDecision(Enum):
    """What follows the end of a role."""

    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give up"


def decide(*, code: int, stopping: bool, over: bool, needed: bool, restarts: int, limit: int) -> RestartDecision:
    """Decide what follows the end of a role.

    stopping: the supervisor asked for this end. over: nothing is left for this role to do. needed: the run cannot
    finish without this role. restarts: how often this invocation has restarted it; limit: how often it may.

    A role that exits with 0 left on purpose and comes back only if the run needs it. Once there is nothing left to do,
    any end is final. A role that ends with EXIT_CONFIG would end the same way again.
    """
    if stopping or over or (code == 0 and not needed):
        return RestartDecision.DONE
    return RestartDecision.RESTART if restarts < limit and code != EXIT_CONFIG else RestartDecision.GIVE_UP


class Supervisor:
    """The roles of one run that this command keeps."""

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
        spares: Servers that are started on demand.
        restarts: Restarts of earlier invocations, by role.
        warn: Gets the deaths of roles.
        stop_timeout_s: Seconds from SIGTERM to SIGKILL.
        sees_whole_run: False if other commands keep servers of the same run and nobody calls `mark_ready`: then a
            server that leaves is never needed, and one that starts counts as one that runs.
        end_leftovers: Ends processes that roles have shared, once all roles have ended.
        """
        self._runners = {runner.name: runner for runner in (*runners, *spares)}
        self._first = [runner.name for runner in runners]
        self._spares = [runner.name for runner in spares]
        self._warn = warn
        self._stop_timeout_s = stop_timeout_s
        self._progress = progress or RunProgress()
        self._sees_whole_run = sees_whole_run
        self._end_leftovers = end_leftovers
        self._stopping = False
        self._retired: set[str] = set()
        self.given_up: dict[str, str] = {}
        """Rollout server that was given up -> the reason."""
        self._tasks: asyncio.TaskGroup | None = None
        self._ends: dict[str, asyncio.Future[RoleEnd]] = {}
        """Role that has been started -> its end."""
        self._started_s: dict[str, float] = {}
        self.states = {name: RoleState(name, "starting", restarts.get(name, 0)) for name in self._first}

    async def watch(self) -> None:
        """Start every role and wait until all have ended. Raises RoleFailed, or WaitTimeout for a role without room,
        when the run cannot continue without a role."""
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = group
                for name in self._first:
                    group.create_task(self._run_with_restarts(self._runners[name]), name=f"run {name}")
        except* AsyncGrpoError as failures:
            raise failures.exceptions[0] from None

    def start_spare(self) -> str:
        """Start the first spare server that does not run; returns its name, "" if there is none or the run ends."""
        free = [name for name in self._spares if not self.is_active(name) and name not in self.given_up]
        if not free or self._tasks is None or self._is_ending():
            return ""
        name = free[0]
        self._retired.discard(name)
        self.states[name] = RoleState(name, "starting", self.states[name].restarts if name in self.states else 0)
        self._tasks.create_task(self._run_with_restarts(self._runners[name]), name=f"run {name}")
        return name

    def retire_server(self, name: str) -> None:
        """Stop a spare server for now: it stores its partials, gives its groups back and is not restarted."""
        if self._tasks is not None and not self._is_ending() and name in self._spares and self.is_active(name):
            self._retired.add(name)
            self._tasks.create_task(self._terminate(name), name=f"retire {name}")

    def give_up_role(self, name: str, why: str) -> None:
        """Stop a rollout server for good; the run continues with the others. Raises RoleFailed, with the reason `why`,
        for the trainer and for the last server."""
        self._continue_without(name, why, self._other_servers(name, ACTIVE))
        if self._tasks is not None and not self._stopping:
            self._tasks.create_task(self._terminate(name), name=f"give up {name}")

    def can_retire(self, name: str) -> bool:
        """True if the role is a server that `retire_server` would stop."""
        return name in self._spares and name not in self._retired

    def is_active(self, name: str) -> bool:
        """True if the role runs, or is about to."""
        return name in self.states and self.states[name].state in ACTIVE

    def mark_ready(self, name: str) -> float | None:
        """Record that the role is ready. The first time since its start, returns the seconds that the start took."""
        role = self.states[name]
        if role.state != "starting" or name not in self._ends:
            return None
        self.states[name] = replace(role, state="running")
        return time.monotonic() - self._started_s[name]

    def live_states(self, usual_s: Callable[[str], float | None]) -> list[RoleState]:
        """The states of all roles, with stage and duration of the start for those that are starting."""
        found = []
        for name, role in self.states.items():
            if role.state == "starting" and name in self._ends:
                stage, age_s = self._runners[name].stage(), time.monotonic() - self._started_s[name]
                role = replace(role, stage=stage, since_s=age_s, usual_s=usual_s(name))
            found.append(role)
        return found

    def pid(self, name: str) -> int | None:
        """PID of the role's process; None if it does not run on this machine."""
        return self._runners[name].pid

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by role, those of earlier invocations of this run included."""
        return {name: state.restarts for name, state in self.states.items()}

    async def stop(self) -> None:
        """Send SIGTERM to every role, wait, kill those that stay, and end the processes that they left. Idempotent."""
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
        await asyncio.to_thread(self._end_leftovers)

    def kill(self) -> None:
        """Send SIGKILL to all roles now; `stop` then has nothing to wait for."""
        for runner in self._runners.values():
            runner.kill()

    async def _run_with_restarts(self, runner: RoleRunner) -> None:
        """Run the role, and start it again as long as `decide` allows it."""
        name, used = runner.name, 0
        while not self._stopping and name not in self.given_up:
            try:
                end = await self._run_once(runner)
            except WaitTimeout as error:
                others = self._other_servers(name, ACTIVE)
                if name == TRAINER or not others:
                    raise
                self._continue_without(name, str(error), others)
                return
            if end.is_moved and self._is_wanted(name):
                self._set_state(name, "restarting")
                self._warn(f"{end.explanation}; it is started elsewhere")
                continue
            if end.code and name != TRAINER and not self._stopping:
                # It could not give its groups back, and until their leases expire no other server continues them.
                await self._progress.expire_leases(name)

            decision = decide(
                code=end.code,
                stopping=not self._is_wanted(name),
                over=name != TRAINER and not self._stopping and await self._progress.is_generated(),
                needed=end.code != 0 or await self._is_needed(name),
                restarts=used,
                limit=runner.restarts,
            )
            if decision is RestartDecision.DONE:
                self._finish(name, end)
                return
            if decision is RestartDecision.GIVE_UP:
                # A server that still starts reads the same configuration, and would end in the same way.
                same_fault = end.code == EXIT_CONFIG and self._sees_whole_run
                able = self._other_servers(name, ("running",) if same_fault else ACTIVE)
                self._continue_without(name, f"{end.explanation}. {_why_no_more(end.code, used)}", able)
                return

            used += 1
            self.states[name] = RoleState(name, "restarting", self.states[name].restarts + 1)
            self._warn(
                f"{end.explanation}; restart {used} of {runner.restarts}",
                failed_role=name,
                **_how_it_ended(end.code),
                restart=used,
                restart_limit=runner.restarts,
            )

    async def _run_once(self, runner: RoleRunner) -> RoleEnd:
        """Start the role and wait for its end."""
        name = runner.name
        await runner.start()
        self._started_s[name] = time.monotonic()
        self._ends[name] = asyncio.ensure_future(runner.wait())
        if name not in self.given_up:
            self._set_state(name, "starting")
        if not self._is_wanted(name):  # stopped, retired or given up while it was being started
            runner.stop()
        end = await asyncio.shield(self._ends[name])
        del self._ends[name]  # not reached when cancelled: `stop` then still waits for the role
        return end

    def _finish(self, name: str, end: RoleEnd) -> None:
        if name not in self.given_up:
            self._set_state(name, "stopped" if end.code and self._stopping else "finished")
        if name == TRAINER:
            # The run is over: servers that have no room yet would wait for it in vain.
            for runner in self._runners.values():
                if runner.waits_for_room:
                    runner.stop()

    async def _terminate(self, name: str) -> None:
        """Send SIGTERM to a retired server, and SIGKILL if it stays."""
        end = self._ends.get(name)
        if end is None:
            return  # it is between two starts; `_run_once` stops the next
        self._runners[name].stop()
        await asyncio.wait([end], timeout=self._stop_timeout_s)
        if not end.done():
            self._runners[name].kill()

    def _continue_without(self, name: str, why: str, others: Sequence[str]) -> None:
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
        """The other rollout servers that are in one of these states."""
        return [role.name for role in self.states.values() if role.name not in (TRAINER, name) and role.state in states]

    def _is_wanted(self, name: str) -> bool:
        return not (self._stopping or name in self._retired or name in self.given_up)

    def _is_ending(self) -> bool:
        return self._stopping or not self.is_active(TRAINER)

    async def _is_needed(self, name: str) -> bool:
        """The run needs its trainer until every step is trained, and a rollout server until the trainer has left."""
        if not self._sees_whole_run:
            return False
        if name == TRAINER:
            return not await self._progress.is_trained()
        return not self._other_servers(name, ACTIVE) and self.states[TRAINER].state != "finished"

    def _set_state(self, name: str, state: str) -> None:
        self.states[name] = replace(self.states[name], state=state)


def _how_it_ended(code: int) -> dict[str, Any]:
    """How a role has ended, for a JSON log."""
    return {"signal": signal_name(-code)} if code < 0 else {"exit_code": code}


def _why_no_more(code: int, used: int) -> str:
    if code == EXIT_CONFIG:
        return "It is not restarted, because it would fail again: correct what it names"
    return f"It has been restarted {used} times in this invocation, which is the limit. See its log"
