"""RoleSupervisor: starts the roles of a run, watches them, restarts them or gives up, and stops them in order.

    watch():  starts every role at once (each waits by itself for what it needs); one task for each role waits for its
              end. Returns when the trainer has finished and the rollout servers have left, or raises RoleFailed when
              the trainer, or the last rollout server, has died too often
    start_spare(), retire(): one server more, or one less, which gives back what it has
    give_up(): stop a server that does not become ready; the run continues with the others
    stop():   SIGTERM to all roles (rollout servers store partials, the trainer saves a checkpoint), SIGKILL to those
              that are still there at the deadline; no process is left

The server that holds the buffer is started before all roles and stopped after them. `decide` is the pure policy of
restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import Enum

from async_grpo.app.launch.role_process import RoleProcess, RoleSpec, end_fields
from async_grpo.app.report.live_state import RoleState, Warn, warn_by
from async_grpo.errors import EXIT_CONFIG, RoleFailed
from async_grpo.utils import processes

TRAINER = "trainer"
"""The name of the trainer's role; all others are rollout servers."""


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


async def _not_yet() -> bool:
    return False


async def _keep_leases(name: str) -> None:
    """Default without a buffer: let the leases of a dead server expire."""


class RoleSupervisor:
    """The roles of one run on this machine."""

    def __init__(
        self,
        run: str,
        specs: Sequence[RoleSpec],
        *,
        spares: Sequence[RoleSpec] = (),
        restarts: dict[str, int],
        say: Callable[[str], None],
        warn: Warn | None = None,
        stop_timeout_s: float,
        trained: Callable[[], bool] = lambda: True,
        generated: Callable[[], Awaitable[bool]] = _not_yet,
        expire_leases: Callable[[str], Awaitable[None]] = _keep_leases,
    ) -> None:
        """`warn` gets the deaths of roles, `say` if it is None. `spares`: servers that are started on demand.
        `restarts` counts those of earlier invocations, by role. `trained` says whether the last step has been trained,
        `generated` whether the rollout servers have nothing left to do: then none is restarted. `expire_leases` gets
        the name of a rollout server that has died."""
        self._run = run
        self._specs = {spec.name: spec for spec in specs}
        self._warn = warn or warn_by(say)
        self._stop_timeout_s = stop_timeout_s
        self._stopping = False
        self._spares = {spec.name: spec for spec in spares}
        self._retired: set[str] = set()
        self.given_up: dict[str, str] = {}
        """Rollout server that was given up -> the reason."""
        self._tasks: asyncio.TaskGroup | None = None
        self._trained = trained
        self._generated = generated
        self._expire_leases = expire_leases
        self._running: dict[str, RoleProcess] = {}
        self.states = {name: RoleState(name, "starting", restarts.get(name, 0)) for name in self._specs}

    async def watch(self) -> None:
        """Start every role and wait until all have ended. Raises RoleFailed when one has died too often without which
        the run cannot go on."""
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = group
                for spec in self._specs.values():
                    group.create_task(self._keep(spec), name=f"keep {spec.name}")
        except* RoleFailed as failures:
            raise failures.exceptions[0] from None

    def start_spare(self) -> str:
        """Start the first spare server that does not run; returns its name, "" if there is none or the run ends."""
        free = [name for name in self._spares if not self.is_kept(name) and name not in self.given_up]
        if not free or self._tasks is None or self._is_ending():
            return ""
        name = free[0]
        self._retired.discard(name)
        self.states[name] = RoleState(name, "starting", self.states[name].restarts if name in self.states else 0)
        self._tasks.create_task(self._keep(self._spares[name]), name=f"keep {name}")
        return name

    def retire(self, name: str) -> None:
        """Stop a spare server for now: it stores its partials, gives its groups back and is not restarted."""
        if self._tasks is not None and not self._is_ending() and name in self._spares and self.is_kept(name):
            self._retired.add(name)
            self._tasks.create_task(self._part_with(name), name=f"retire {name}")

    def give_up(self, name: str, why: str) -> None:
        """Stop a rollout server for good; the run continues with the others. Raises RoleFailed, with the reason `why`,
        for the trainer and for the last server."""
        self._continue_without(name, why, self._other_servers(name, "starting", "running", "restarting"))
        if self._tasks is not None and not self._stopping:
            self._tasks.create_task(self._part_with(name), name=f"give up {name}")

    def _continue_without(self, name: str, why: str, others: Sequence[str]) -> None:
        self.states[name] = replace(self.states[name], state="failed")
        if name == TRAINER or not others:
            raise RoleFailed(f"{why}; the same command resumes the run")
        self.given_up[name] = why
        self._warn(
            f"{why}. The run continues without {name}, with {', '.join(others)}",
            level="error",
            failed_role=name,
            given_up=True,
        )

    def _other_servers(self, name: str, *states: str) -> list[str]:
        """The other rollout servers that are in one of these states."""
        return [role.name for role in self.states.values() if role.name not in (TRAINER, name) and role.state in states]

    def is_spare(self, name: str) -> bool:
        """Whether the role is a server that may be retired."""
        return name in self._spares and name not in self._retired

    def is_kept(self, name: str) -> bool:
        """Whether the role runs, or is about to."""
        return name in self.states and self.states[name].state in ("starting", "running", "restarting")

    def _is_ending(self) -> bool:
        return self._stopping or not self.is_kept(TRAINER)

    async def _part_with(self, name: str) -> None:
        """Send SIGTERM to a retired server, and SIGKILL if it stays."""
        if (role := self._running.get(name)) is None:
            return  # it is between two starts; `_run_once` stops the next
        role.ask_to_stop()
        await asyncio.wait([asyncio.ensure_future(role.wait())], timeout=self._stop_timeout_s)
        role.kill()

    async def stop(self) -> None:
        """Send SIGTERM to every role, wait, kill those that stay, and end the processes that they left. Idempotent."""
        self._stopping = True
        leaving = list(self._running.values())
        for role in leaving:
            role.ask_to_stop()
        if leaving:
            waits = [asyncio.create_task(role.wait()) for role in leaving]
            _, late = await asyncio.wait(waits, timeout=self._stop_timeout_s)
            for role in leaving if late else []:
                role.kill()
            await asyncio.gather(*waits)
        await asyncio.to_thread(processes.end_family, processes.mark(self._run))

    def kill(self) -> None:
        """Send SIGKILL to all roles now; `stop` then has nothing to wait for."""
        for role in self._running.values():
            role.kill()

    def pid(self, name: str) -> int | None:
        """PID of the role's process; None if it does not run."""
        role = self._running.get(name)
        return role.pid if role else None

    def heard_of(self, name: str) -> float | None:
        """Record that the role is ready. The first time since its start, returns the seconds that the start took."""
        role, process = self.states[name], self._running.get(name)
        if role.state != "starting" or process is None:
            return None
        self.states[name] = replace(role, state="running")
        return process.age_s

    def shown(self, usual_s: Callable[[str], float | None]) -> list[RoleState]:
        """The states of all roles, with stage and duration of the start for those that are starting."""
        return [self._shown(role, usual_s) for role in self.states.values()]

    def _shown(self, role: RoleState, usual_s: Callable[[str], float | None]) -> RoleState:
        process = self._running.get(role.name)
        if role.state != "starting" or process is None:
            return role
        return replace(role, stage=process.stage(), since_s=process.age_s, usual_s=usual_s(role.name))

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by role, those of earlier invocations of this run included."""
        return {name: state.restarts for name, state in self.states.items()}

    async def _keep(self, spec: RoleSpec) -> None:
        """Run the role, and restart it as long as `decide` says so."""
        used = 0
        while not self._stopping and spec.name not in self.given_up:
            role, code = await self._run_once(spec)
            if code and spec.name != TRAINER and not self._stopping:
                # It could not give its groups back, and until their leases expire nobody else would go on with them.
                await self._expire_leases(spec.name)
            decision = decide(
                code=code,
                stopping=self._stopping or spec.name in self._retired or spec.name in self.given_up,
                over=spec.name != TRAINER and not self._stopping and await self._generated(),
                needed=self._needed(spec),
                restarts=used,
                limit=spec.restarts,
            )
            if decision is RestartDecision.DONE:
                if spec.name not in self.given_up:
                    self._mark(spec, "stopped" if code and self._stopping else "finished")
                return
            if decision is RestartDecision.GIVE_UP:
                # A server that still starts reads the same configuration, and would end in the same way.
                able = ("running",) if code == EXIT_CONFIG else ("starting", "running", "restarting")
                why = f"{role.explain(code)}. {_why_no_more(code, used)}"
                self._continue_without(spec.name, why, self._other_servers(spec.name, *able))
                return
            used += 1
            self.states[spec.name] = RoleState(spec.name, "restarting", self.states[spec.name].restarts + 1)
            self._warn(
                f"{role.explain(code)}; restart {used} of {spec.restarts}",
                **end_fields(spec.name, code),
                restart=used,
                restart_limit=spec.restarts,
            )

    async def _run_once(self, spec: RoleSpec) -> tuple[RoleProcess, int]:
        role = await RoleProcess.start(spec, self._run)
        self._running[spec.name] = role
        if spec.name not in self.given_up:
            self._mark(spec, "starting")
        if self._stopping or spec.name in self._retired or spec.name in self.given_up:  # while it was being started
            role.ask_to_stop()
        code = await asyncio.shield(role.wait())
        self._running.pop(spec.name)  # not reached when cancelled: `stop` then still finds the role
        return role, code

    def _needed(self, spec: RoleSpec) -> bool:
        """The run needs its trainer until every step is trained, and a rollout server until the trainer has left."""
        if spec.name == TRAINER:
            return not self._trained()
        alone = not self._other_servers(spec.name, "starting", "running", "restarting")
        return alone and self.states[TRAINER].state != "finished"

    def _mark(self, spec: RoleSpec, state: str) -> None:
        self.states[spec.name] = replace(self.states[spec.name], state=state)


def _why_no_more(code: int, used: int) -> str:
    if code == EXIT_CONFIG:
        return "It is not restarted, because it would fail again: correct what it names"
    return f"It has been restarted {used} times in this invocation, which is the limit. See its log"
