"""The ranks of this machine as processes: their environment, their error output, and how they end.

node --environment--> rank 0 .. N-1 --standard error--> node --same lines--> log
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import CONFIG_FAULTS, TrainingError
from async_grpo.telemetry.logging import fatal_events, redact_secrets
from async_grpo.telemetry.role_history import VARIABLE
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.utils.child_process import child_argv, signal_name
from async_grpo.utils.network import card_environment
from trainer.platform import select_platform
from trainer.ranks.store import OPENED

log = structlog.get_logger()

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL, in which ranks can end and write their last output."""

KILLED_S = 30.0
"""Seconds to wait after SIGKILL. A process that hangs in a driver or on a dead NFS never ends."""

_STANDARD_ERROR = 2
_TAIL_BYTES = 16 << 10

_LAST_OUTPUT_S = 1.0
"""Seconds to wait for a rank's remaining output. A child of the rank may keep its standard error open for longer."""

_SHOWN_CHARACTERS = 500
_RANK = r"(?:\[rank\d+\]: ?)?"  # torch puts it before every line of a traceback
_FAULTS = "|".join(fault.__name__ for fault in CONFIG_FAULTS)

_ERROR = re.compile(
    rf"(?:^{_RANK}[ \t]+\S.*\n{_RANK}(?=[A-Za-z_])|^(?=(?:{_FAULTS}): ))([\w.]+(?:: .*)?)$", re.MULTILINE
)
"""The last line of a traceback, which is not indented and follows one that is. Also the line of a configuration fault,
which has no traceback."""


class RankFailed(TrainingError):
    """A rank has ended with the exit code `code`, above 0."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Terminated(TrainingError):
    """SIGTERM has ended a rank, which can only happen before it has joined the run."""


def rank_environments(config: TrainerConfig, node_rank: int, store: tuple[str, int] | None) -> list[dict[str, str]]:
    """Return the environment of each rank of this node. `store`: address of the store; None for a single rank."""
    count = config.processes_per_node
    shared = {
        "WORLD_SIZE": str(config.processes),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(config.nodes),
    }
    if store is not None:
        address, port = store
        shared |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), OPENED: "True"}
    return [shared | {"RANK": str(node_rank * count + local), "LOCAL_RANK": str(local)} for local in range(count)]


def network_environment(platform: str, own_address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the network card that reaches the other nodes, for libraries that would guess it.

    Variables that the user has set are left out. Returns {} if no card has the address.
    """
    variables = card_environment(own_address, select_platform(platform).network_variables)
    return {name: value for name, value in variables.items() if name not in environment}


class ErrorOutput:
    """Standard error of a rank: forwarded line by line, so that lines of ranks do not mix. Its tail is kept.

    A thread reads it: a rank must not block because its node is busy.
    """

    def __init__(self) -> None:
        reading, self.write_end = os.pipe()
        self._tail = b""
        self._thread = threading.Thread(target=self._forward, args=(reading,), name="rank-errors", daemon=True)
        self._thread.start()

    def last_error(self) -> str:
        """Return the last error of a traceback, else the last line; "" if nothing was written."""
        tail = self._tail.decode("utf-8", "replace")
        candidates = fatal_events(tail) or _ERROR.findall(tail)
        if not candidates:
            candidates = [line.strip() for line in tail.splitlines() if line.strip()]
        if not candidates:
            return ""
        return redact_secrets(candidates[-1])[:_SHOWN_CHARACTERS]

    async def read_to_the_end(self) -> None:
        """Wait until everything is forwarded, at most _LAST_OUTPUT_S."""
        await asyncio.to_thread(self._thread.join, _LAST_OUTPUT_S)

    def _forward(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as stream:
            for line in stream:
                self._tail = (self._tail + line)[-_TAIL_BYTES:]
                try:
                    os.write(_STANDARD_ERROR, line)
                except OSError:  # the disk of the log is full: keep reading, or the rank would block
                    continue


@dataclass(slots=True)
class Rank:
    """The process of a rank, which dies with this process."""

    number: int
    """Number of the rank among those of all nodes."""
    process: asyncio.subprocess.Process
    errors: ErrorOutput

    @classmethod
    async def start(cls, argv: Sequence[str], environment: Mapping[str, str]) -> Rank:
        """Start the process in a separate session, so that Ctrl-C reaches only the node, which forwards it."""
        # The node records the history of the role, so the rank must not (VARIABLE is empty).
        errors = ErrorOutput()
        try:
            process = await asyncio.create_subprocess_exec(
                *child_argv(argv),
                env={**os.environ, **environment, VARIABLE: ""},
                stderr=errors.write_end,
                start_new_session=True,
            )
        finally:
            os.close(errors.write_end)
        return cls(int(environment["RANK"]), process, errors)

    async def wait(self) -> None:
        """Wait until the rank has ended with 0. Raises RankFailed, Terminated, or TrainingError for another signal."""
        code = await self.process.wait()
        if code == -signal.SIGTERM:
            raise Terminated(f"rank {self.number} was killed by SIGTERM")
        if code < 0:
            raise TrainingError(f"rank {self.number} was killed by {signal_name(-code)}")
        if code > 0:
            await self.errors.read_to_the_end()
            cause = self.errors.last_error()
            raise RankFailed(f"rank {self.number} ended with exit code {code}{': ' + cause if cause else ''}", code)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is still running."""
        if self.process.returncode is None:
            self.process.send_signal(number)


@dataclass(slots=True)
class LocalRanks:
    """The ranks of this node."""

    ranks: list[Rank]

    @classmethod
    async def start(cls, argv: Sequence[str], environments: Sequence[Mapping[str, str]]) -> LocalRanks:
        """Start a rank for each environment."""
        return cls([await Rank.start(argv, environment) for environment in environments])

    async def wait(self) -> None:
        """Wait until all ranks have ended with 0. Raises the error of the first that fails, see `Rank.wait`."""
        waiting = [asyncio.create_task(rank.wait()) for rank in self.ranks]
        try:
            await asyncio.gather(*waiting)
        finally:
            await cancel_and_wait(*waiting)

    def request_stop(self) -> None:
        """Send SIGTERM to rank 0, which stops all ranks after a checkpoint. Only on the node of rank 0."""
        # Not to the others: a rank that has not joined the run yet does not ignore SIGTERM and would be killed by it.
        self.ranks[0].send_signal(signal.SIGTERM)

    async def terminate(self) -> None:
        """End the remaining ranks: SIGTERM, then SIGKILL after GRACE_S.

        A rank that survives SIGKILL for KILLED_S is abandoned. Waiting for it would prevent a restart of the node.
        """
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)
        remaining = [asyncio.create_task(rank.process.wait()) for rank in self.ranks]
        await asyncio.wait(remaining, timeout=GRACE_S)
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
        await asyncio.wait(remaining, timeout=KILLED_S)
        await cancel_and_wait(*remaining)
        stuck = [rank.number for rank in self.ranks if rank.process.returncode is None]
        if stuck:
            log.error("ranks survived SIGKILL and are abandoned", ranks=stuck, killed_s=KILLED_S)
        await asyncio.gather(*(rank.errors.read_to_the_end() for rank in self.ranks))
