"""Monitor: polls a running job twice a second, updates the live view, checks deadlines, restarts the embedded server.

It reads the buffer's counters, the run board and the new rows of metrics.jsonl, and passes the rows to the autoscaler.
It decides nothing about training. `poll` waits for the server of the buffer. If that server is unreachable, the monitor
does not end the run: the roles wait for it until their own timeouts, and the supervisor restarts them or gives up.
An embedded server that has died is restarted, after a full disk as soon as there is space again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from async_grpo.app.launch.autoscaler import Autoscaler
from async_grpo.app.launch.role_process import StartTimes
from async_grpo.app.launch.state_plane import StatePlane
from async_grpo.app.launch.supervisor import TRAINER, RunProgress, Supervisor
from async_grpo.app.report.live_state import LiveState, Warn
from async_grpo.errors import BufferFault, ServerLost
from async_grpo.models.hub import cache_dir
from async_grpo.telemetry.jsonl import RowFollower
from async_grpo.telemetry.rows import number, rows_of_kind
from async_grpo.wire.board import ReplayProgress
from buffer import BufferStats, EmbeddedServer, is_run_over

POLL_EVERY_S = 0.5
ROOM_BYTES = 16 << 20
"""Bytes that must become free before a server whose disk was full is started again."""
EXPIRE_TIMEOUT_S = 2.0
"""Maximum seconds by which expiring its leases may delay the restart of a rollout server."""


class LocalProgress(RunProgress):
    """Progress of a run according to its buffer. `stats` is from the monitor's last poll."""

    def __init__(self, plane: StatePlane, report_progress: Callable[[str], None]) -> None:
        self._plane = plane
        self._report_progress = report_progress
        self.stats: BufferStats | None = None

    async def is_trained(self) -> bool:
        """True if the last step has been published; False if the server of the buffer does not answer."""
        steps = self._plane.config.steps
        if self.stats is None or self.stats.version < steps:
            # The trainer exits a moment after its last step. The stats of the last poll may be older than that step;
            # trusting them would restart a trainer that has finished.
            try:
                self.stats = await self._plane.buffer.stats()
            except BufferFault:
                return False
        return self.stats.version >= steps

    async def is_generated(self) -> bool:
        """True if rollout servers have nothing left to do; False if the server of the buffer does not answer."""
        try:
            return await self.is_trained() and await is_run_over(
                self._plane.config, self._plane.buffer, self._plane.board
            )
        except ServerLost:
            return False  # a role that is restarted without need exits by itself

    async def expire_leases(self, server: str) -> None:
        """Return the groups of a dead rollout server to the buffer. If that fails, its leases expire later."""
        try:
            async with asyncio.timeout(EXPIRE_TIMEOUT_S):
                await self._plane.buffer.expire_leases(server, life=round(1000 * time.time()))
        except (BufferFault, TimeoutError) as error:
            reason = str(error) or "the buffer does not answer"
            self._report_progress(
                f"the leases of {server} could not be ended early and will expire by themselves: {reason}"
            )


class Monitor:
    """Reads the state of a run and shows it, until cancelled."""

    def __init__(
        self,
        plane: StatePlane,
        supervisor: Supervisor,
        progress: LocalProgress,
        *,
        show: Callable[[LiveState], None],
        report_progress: Callable[[str], None],
        warn: Warn,
    ) -> None:
        """Args:
        progress: Receives the buffer's counters of each poll.
        show: Receives the state of each poll.
        report_progress: Receives a message for each server that the autoscaler starts or stops.
        warn: Receives problems.
        """
        self._plane = plane
        self._config = plane.config
        self._supervisor = supervisor
        self._show = show
        self._warn = warn
        self._starts = StartTimes(plane.config, cache_dir() / "starts.json")
        self._metrics = RowFollower(plane.config.run_dir / "metrics.jsonl")
        self._step: dict[str, Any] | None = None
        self._started_s, self._started_at_s = time.monotonic(), time.time()
        self._unready_since: dict[str, float] = {}
        self._replay: ReplayProgress | None = None
        self._progress = progress
        scales = plane.config.launch.autoscale.max_servers is not None
        self._autoscaler = Autoscaler(plane.config, supervisor, report_progress) if scales else None

    async def watch(self) -> None:
        """Poll until cancelled. Raises RoleFailed if the trainer, or the last rollout server, is not ready in time."""
        is_reachable = True
        while True:
            try:
                await self.poll()
            except ServerLost as error:
                if is_reachable:
                    self._warn(f"waiting for the server: {error}")
                is_reachable = False
            else:
                is_reachable = True
            await asyncio.sleep(POLL_EVERY_S)

    async def poll(self) -> None:
        """Read the state once, check deadlines and show it. Raises ServerLost, RoleFailed."""
        stats = self._progress.stats = await self._plane.buffer.stats()
        beats = await self._plane.board.live_servers()

        # A role is ready when it reports to the board.
        ready = {beat.name for beat in beats}
        if await self._plane.board.publisher_address() is not None:
            ready.add(TRAINER)
        replay = await self._plane.board.replay_progress()
        if replay != self._replay:
            # A trainer that repeats steps after a restart publishes nothing, so servers that started meanwhile cannot
            # become ready. While it makes progress, their deadline starts again.
            self._replay = replay
            self._unready_since.clear()
        self._check_ready(ready)

        written = self._metrics.read_new_rows()
        rows = [row for row in written if row.get("kind") == "step"]
        for row in rows_of_kind(written, "warning"):
            if (number(row, "time_s") or 0.0) >= self._started_at_s:  # not those of an earlier invocation
                self._warn(f"{TRAINER}: {row.get('message')}")
        if rows:
            self._step = rows[-1]
        if self._autoscaler is not None:
            self._autoscaler.scale_servers(rows, beats)

        self._show(
            LiveState(
                step=self._step,
                steps_done=stats.version,
                evaluations=await self._plane.board.evaluations(),
                waiting=stats.waiting,
                inflight=stats.inflight,
                ready=stats.ready,
                taken=stats.taken,
                active=stats.active,
                capacity=stats.capacity,
                servers=beats,
                counters=await self._plane.board.counters(),
                roles=self._supervisor.live_states(self._starts.usual_s),
                elapsed_s=time.monotonic() - self._started_s,
            )
        )

    def _check_ready(self, ready: set[str]) -> None:
        """Give up roles that were not ready within launch.ready_timeout_s. The run continues with the other servers.

        Raises RoleFailed for the trainer and for the last server.
        """
        limit = self._config.launch.ready_timeout_s
        for name, role in list(self._supervisor.states.items()):
            if name in ready and (took_s := self._supervisor.mark_ready(name)) is not None:
                self._starts.record_start(name, took_s)
            if name in ready or role.state in ("finished", "stopped", "failed"):
                self._unready_since.pop(name, None)
                continue
            since = self._unready_since.setdefault(name, time.monotonic())
            if time.monotonic() - since > limit:
                self._supervisor.give_up_role(
                    name,
                    f"{name} was not ready within {limit:g} s (launch.ready_timeout_s). See its log "
                    f"{self._config.run_dir / 'logs' / name}.log. On a slow machine, raise launch.ready_timeout_s",
                )

    async def keep_server_alive(self) -> None:
        """Restart the embedded server on its append-only file whenever it has died, until cancelled.

        Runs in its own task, because `poll` waits for the server and would not return while it is dead. Raises
        ServerLost if it cannot be started, or if its disk stays full for redis.timeout_s.
        """
        server = self._plane.server
        while True:
            if server is not None and (full := server.disk_full()):
                self._warn(f"{full}; the run waits {self._config.redis.timeout_s:g} s for space")
                await self._wait_for_space(server)
            if server is not None and not server.alive():
                self._warn("the embedded server died; restarting it on its append-only file")
                # Launch in the main thread, not in a worker: the server is set to die with the thread that starts it.
                server.launch()
                await asyncio.to_thread(server.wait_until_ready)
            await asyncio.sleep(POLL_EVERY_S)

    async def _wait_for_space(self, server: EmbeddedServer) -> None:
        """Wait until the server can write again, or has enough space for a restart."""
        timeout_s = self._config.redis.timeout_s
        deadline_s = time.monotonic() + timeout_s
        needed_bytes = server.free_bytes() + ROOM_BYTES
        while (full := server.disk_full()) and (server.alive() or server.free_bytes() < needed_bytes):
            if time.monotonic() > deadline_s:
                raise ServerLost(
                    f"{full}, for {timeout_s:g} s, so the server of this run cannot write its append-only file. "
                    f"Acknowledged data is not lost. Free {ROOM_BYTES >> 20} MB or more; the same command resumes"
                )
            await asyncio.sleep(POLL_EVERY_S)
