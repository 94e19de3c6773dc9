"""Client of the receiver process, which all rollout servers of a run on one machine share.

    run board --address--> _follow_publisher --FollowPublisher--> receiver process (one per machine, shared)
                              _keep_connected <--ReceiverState--         |
    wait_for_newer_version, hold_newest <---+                            +--> store --mmap--> this server's engine

Two tasks run. `_follow_publisher` looks up the publisher every few heartbeats and sends its address to the process.
`_keep_connected` starts the process if there is none, and reads its messages. `wait_for_newer_version` waits for a
state with newer weights. `hold_newest` keeps them from being overwritten while an engine loads them.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import PublisherLost, WaitTimeout, WeightsCorrupt, WeightsError, WireError
from async_grpo.utils.aio import root_cause
from async_grpo.utils.files import make_private_folder
from async_grpo.utils.frames import FrameReader
from async_grpo.weights.base import HeldWeights, Resolve
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.local_socket import (
    MAX_FRAME_BYTES,
    Failed,
    FollowPublisher,
    Held,
    Hold,
    ReceiverPaths,
    ReceiverState,
    Release,
    ServerHello,
    ToServer,
    is_abandoned,
    pack_message,
    remove_abandoned_files,
    start_receiver,
)
from async_grpo.weights.node.stats import ReceiverStats
from async_grpo.weights.zmq.sockets import HEARTBEATS_OF_SILENCE, keys_for
from async_grpo.wire.board import PublisherAddress
from async_grpo.wire.records import Record

START_TIMEOUT_S = 60.0
HOLD_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
_CONNECT_RETRY_S = 0.05
_REPLACEMENT_TIMEOUT_S = 0.5
"""Seconds within which another server of this machine would have started a new receiver process."""
_messages = msgspec.msgpack.Decoder(ToServer)

log = structlog.get_logger()


class SharedWeightReceiver:
    """Client of one receiver process: the `WeightReceiver` of a rollout server, for all transports.

    Clients with the same `store_path` share one process, and the first of them starts it.
    """

    def __init__(self, resolve: Resolve, store_path: Path, config: WeightsConfig, *, name: str = "") -> None:
        """Start to receive. Needs a running event loop. `resolve` looks up the publisher's address.

        Raises ConfigError if encryption is on and the secret is missing.
        """
        keys_for(config)  # a missing secret is reported here, not in the process's log
        self.store_path = store_path
        self.stats = ReceiverStats()
        """Counters of the shared process, from its last heartbeat."""
        self.restarts = 0
        """Number of times that the process ended and another one was found or started."""
        self._resolve = resolve
        self._config = config
        self._name = name
        self._paths = ReceiverPaths(store_path)
        self._state = ReceiverState(stats=self.stats)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._address: PublisherAddress | None = None
        self._last_held: WeightVersion | None = None
        """The version that this server held last. A new process continues after it."""
        self._holding: WeightVersion | None = None
        """The version that an engine loads now."""
        self._hold_number = 0
        self._hold_answers: asyncio.Queue[Held] = asyncio.Queue()
        self._hold_lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self._task = asyncio.create_task(self._run(), name="weight-receiver")

    @property
    def process_id(self) -> int | None:
        """PID of the receiver process; None if another server started it."""
        return self._process.pid if self._process is not None else None

    @property
    def last_transfer_s(self) -> float:
        """Transfer time of the newest weights in seconds, from the manifest to the last chunk."""
        return self.stats.last_transfer_s

    async def wait_for_newer_version(
        self, after: WeightVersion | tuple[int, int] | None, timeout_s: float
    ) -> WeightVersion:
        """Wait until weights newer than `after` are in the store, and return the newest version.

        Raises WaitTimeout if there are none in time, PublisherLost if the publisher is silent, and the error that
        ended the receiver, if any (WeightsCorrupt, ...).
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._failure or self._is_newer(after))
        except TimeoutError:
            raise self._explain_timeout(after, timeout_s) from None
        if not self._is_newer(after):
            assert self._failure is not None
            raise self._failure
        assert self._newest is not None
        return self._newest

    @asynccontextmanager
    async def hold_newest(self) -> AsyncIterator[HeldWeights]:
        """Protect the newest weights from being overwritten inside the block, for at most update_timeout_s.

        Raises WaitTimeout if the receiver does not answer, or has no weights yet.
        """
        async with self._hold_lock:
            self._holding = await self._acquire_hold()
            self._last_held = self._holding
            try:
                yield HeldWeights.in_store(self.store_path, epoch=self._holding.epoch, version=self._holding.version)
            finally:
                self._holding = None
                self._send(Release())

    async def close(self) -> None:
        """Disconnect. The receiver process ends after its last server, and removes the store. Safe to call twice."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._process is not None and self._state.servers <= 1:
            with suppress(subprocess.TimeoutExpired):  # it ends by itself, unless another server has just connected
                await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        if is_abandoned(self._paths):
            # The process was killed. If there is another server, it starts a new one, which adopts the store. If we are
            # the last, nobody else would remove the files, so we wait a little and then do it.
            await asyncio.sleep(_REPLACEMENT_TIMEOUT_S)
            if remove_abandoned_files(self._paths):
                log.warning("removed the weights of a receiver process that was killed", store=str(self.store_path))

    @property
    def _newest(self) -> WeightVersion | None:
        return WeightVersion(*self._state.newest) if self._state.newest is not None else None

    def _is_newer(self, after: tuple[int, int] | None) -> bool:
        return self._newest is not None and (after is None or self._newest > tuple(after))

    def _explain_timeout(self, after: tuple[int, int] | None, timeout_s: float) -> Exception:
        awaited = f"weights newer than {WeightVersion(*after)}" if after else "the first weights"
        state = self._state
        if not state.publisher:
            return WaitTimeout(f"{awaited} (no trainer has set its address on the run board yet)", timeout_s)
        if state.silent_s > HEARTBEATS_OF_SILENCE * self._config.heartbeat_s:
            secret = "" if self._config.encrypt == "off" else ", and does it have the same secret"
            return PublisherLost(
                f"{awaited} did not arrive: the publisher of epoch {state.epoch} at {state.publisher} has been silent "
                f"for {state.silent_s:.1f} s. Is the trainer alive{secret}?"
            )
        return WaitTimeout(f"{awaited} from {state.publisher}, which is alive", timeout_s)

    async def _acquire_hold(self) -> WeightVersion:
        try:
            return await self._request_hold()
        except BaseException:
            # The process may still answer a Hold that nobody waits for any more. Without a Release it would protect
            # that version for update_timeout_s, and skip others.
            self._send(Release())
            raise

    async def _request_hold(self) -> WeightVersion:
        """Send `Hold` until the process answers with a version.

        The process may be killed and replaced meanwhile, or answer None while it writes its only slot. Raises
        WaitTimeout.
        """
        started_s = time.monotonic()
        deadline = started_s + HOLD_TIMEOUT_S
        while (remaining := deadline - time.monotonic()) > 0:
            if self._failure is not None:
                raise self._failure
            self._hold_number += 1
            self._send(Hold(number=self._hold_number))

            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, HEARTBEATS_OF_SILENCE * self._config.heartbeat_s)):
                    answer = await self._hold_answers.get()
                    while answer.number != self._hold_number:  # an answer to an earlier Hold that timed out
                        answer = await self._hold_answers.get()
                    if answer.identity is not None:
                        return WeightVersion(*answer.identity)

                    # The process is alive, but writes its only slot now. That may take as long as a transfer, so each
                    # answer extends the deadline, up to the time that a whole update may take.
                    deadline = min(time.monotonic() + HOLD_TIMEOUT_S, started_s + self._config.update_timeout_s)
                    await asyncio.sleep(_CONNECT_RETRY_S)
        raise WaitTimeout("the receiver process to hold the newest weights", HOLD_TIMEOUT_S, "Is it alive")

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_publisher())
                group.create_task(self._keep_connected())
        except* Exception as failures:
            cause = root_cause(failures)
            if isinstance(cause, WaitTimeout | PublisherLost):
                # These two mean that weights may still come. Now none will, because this task has ended.
                cause = WeightsError(f"no weights are received any more: {cause}")
            self._failure = cause
            await self._notify()  # wait_for_newer_version raises it

    async def _follow_publisher(self) -> None:
        while True:
            address = await self._resolve()
            if address is not None and address != self._address:
                self._address = address
                self._send(FollowPublisher(address=address))
            heartbeats = HEARTBEATS_OF_SILENCE if address is not None else 1
            await asyncio.sleep(heartbeats * self._config.heartbeat_s)

    async def _keep_connected(self) -> None:
        while True:
            reader, self._writer = await self._connect()
            # A new process does not have our hold: repeat it, or the version could be overwritten while it is loaded.
            self._send(ServerHello(name=self._name, has=self._last_held, holding=self._holding))
            if self._address is not None:
                self._send(FollowPublisher(address=self._address))
            await self._listen(reader)
            self._writer.close()
            self._writer = None
            self.restarts += 1
            log.warning("the receiver process of this machine ended; connecting to another or starting one")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the running process, or start one.

        Raises WeightsError or WaitTimeout if it does not start, ConfigError if another user could be listening there.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            make_private_folder(self.store_path.parent)
            with suppress(OSError):
                return await asyncio.open_unix_connection(self._paths.socket)
            # A process that fails before anyone has connected would fail again: its configuration or address is wrong.
            # After a connection the failure was an accident (a kill, say), so a new process is started. Code 0 means
            # that another server's process already listens.
            if self._process is not None and self._process.poll() not in (None, 0) and self.restarts == 0:
                raise WeightsError(
                    f"the receiver process ended with code {self._process.returncode} before it was ready; "
                    "see its messages in this server's log."
                )
            process = start_receiver(self._paths, self._config)
            if process is not None:  # None: another server has just started one
                self._process = process
            await asyncio.sleep(_CONNECT_RETRY_S)
        raise WaitTimeout(f"the receiver process at {self._paths.socket}", START_TIMEOUT_S)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Read messages until the process ends. Raises the error that ended it."""
        frames = FrameReader(reader, MAX_FRAME_BYTES)
        while True:
            try:
                message = _messages.decode(await frames.next())
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            except (WireError, msgspec.MsgspecError) as error:
                raise WeightsError(
                    f"the receiver process of this machine sent a message that this release cannot read ({error}). Is "
                    "it of another release? Stop all rollout servers of the run on this machine and start them again "
                    "with the same release"
                ) from error
            match message:
                case ReceiverState():
                    self._state = message
                    self.stats = message.stats
                    await self._notify()
                case Held():
                    self._hold_answers.put_nowait(message)
                case Failed(message=text, corrupt=corrupt):
                    raise WeightsCorrupt(text) if corrupt else WeightsError(text)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _send(self, message: Record) -> None:
        """Send if connected. After a reconnect, `_keep_connected` sends the state again."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack_message(message))
