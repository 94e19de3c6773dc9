"""A rollout server's end: its connection to the receiver process of the machine.

    run board --address--> _follow --Follow-->  receiver process (one a machine, shared)
                   _keep_connected <--State---         |
    wait_for_newer_version, hold <------+                        +--> store --mmap--> this server's engine

Two tasks run: `_follow` looks the publisher up every few heartbeats and passes its address on; `_keep_connected` starts
the process if there is none and reads what it sends. `wait_for_newer_version` waits for a state with newer
weights; `hold_newest` keeps them in the store while an engine loads them.
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
_SUCCESSOR_S = 0.5
"""Seconds in which another server of this machine starts a receiver again, at most."""
_messages = msgspec.msgpack.Decoder(ToServer)

log = structlog.get_logger()


class SharedWeightReceiver:
    """The newest weights, in the weight store at `store_path`. Several of one path share a receiver process."""

    def __init__(self, resolve: Resolve, store_path: Path, config: WeightsConfig, *, name: str = "") -> None:
        """Start to receive; needs a running event loop. `resolve` returns the address of the publisher.

        Raises ConfigError if a secret is needed and missing.
        """
        keys_for(config)
        self.store_path = store_path
        self.stats = ReceiverStats()
        """Counters of the shared process, as of its last heartbeat."""
        self.restarts = 0
        """How often the process ended and another one was found or started."""
        self._resolve = resolve
        self._config = config
        self._name = name
        self._paths = ReceiverPaths(store_path)
        self._state = ReceiverState(stats=self.stats)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._address: PublisherAddress | None = None
        self._taken: WeightVersion | None = None
        self._holding: WeightVersion | None = None
        self._holds = 0
        self._held: asyncio.Queue[Held] = asyncio.Queue()
        self._hold_lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self._task = asyncio.create_task(self._run(), name="weight-receiver")

    @property
    def process_id(self) -> int | None:
        """PID of the receiver process if this server started it."""
        return self._process.pid if self._process is not None else None

    @property
    def last_transfer_s(self) -> float:
        """Seconds that the newest weights took to this machine, from their manifest until everything was received."""
        return self.stats.last_transfer_s

    async def wait_for_newer_version(
        self, after: WeightVersion | tuple[int, int] | None, timeout_s: float
    ) -> WeightVersion:
        """Wait for weights newer than `after`; they, or newer ones, lie in the store when this returns.

        Raises WaitTimeout if there are none in time, PublisherLost if that is because the publisher has fallen silent,
        and the error that ended the receiver if there was one (WeightsCorrupt, ...).
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
        """The newest weights; they stay in the store for the length of the block, at most update_timeout_s.

        Raises WaitTimeout if the receiver does not answer, or has no weights yet.
        """
        async with self._hold_lock:
            self._taken = self._holding = await self._take_hold()
            try:
                yield HeldWeights.in_store(self.store_path, epoch=self._holding.epoch, version=self._holding.version)
            finally:
                self._holding = None
                self._send(Release())

    async def close(self) -> None:
        """Leave the receiver process, which ends with its last server and removes the store. Safe to call twice."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._process is not None and self._state.servers <= 1:
            with suppress(subprocess.TimeoutExpired):  # it ends by itself, unless another server has just come
                await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        if is_abandoned(self._paths):
            # The receiver was killed. Another server of this machine starts the next one, which takes the store over;
            # if there is none, nobody else would remove it.
            await asyncio.sleep(_SUCCESSOR_S)
            if remove_abandoned_files(self._paths):
                log.warning("removed the weights of a receiver process that was killed", store=str(self.store_path))

    @property
    def _newest(self) -> WeightVersion | None:
        return WeightVersion(*self._state.newest) if self._state.newest is not None else None

    def _is_newer(self, after: tuple[int, int] | None) -> bool:
        return self._newest is not None and (after is None or self._newest > tuple(after))

    def _explain_timeout(self, after: tuple[int, int] | None, timeout_s: float) -> Exception:
        wanted = f"weights newer than {WeightVersion(*after)}" if after else "the first weights"
        state = self._state
        if not state.publisher:
            return WaitTimeout(f"{wanted} from a trainer that has not announced itself", timeout_s)
        if state.silent_s > HEARTBEATS_OF_SILENCE * self._config.heartbeat_s:
            secret = "" if self._config.encrypt == "off" else ", and is the secret the same there"
            return PublisherLost(
                f"{wanted} do not come: the publisher of epoch {state.epoch} at {state.publisher} has been silent for "
                f"{state.silent_s:.1f} s. Is the trainer alive{secret}?"
            )
        return WaitTimeout(f"{wanted} from {state.publisher}, which is alive", timeout_s)

    async def _take_hold(self) -> WeightVersion:
        """Ask until the process answers: it may be killed and another one started meanwhile, or write its only slot."""
        try:
            return await self._ask_for_hold()
        except BaseException:
            # The process may still answer a Hold that nobody waits for any more. Without a Release it would keep that
            # version for update_timeout_s, and skip others.
            self._send(Release())
            raise

    async def _ask_for_hold(self) -> WeightVersion:
        started_s = time.monotonic()
        deadline = started_s + HOLD_TIMEOUT_S
        while (remaining := deadline - time.monotonic()) > 0:
            if self._failure is not None:
                raise self._failure
            self._holds += 1
            self._send(Hold(number=self._holds))
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, HEARTBEATS_OF_SILENCE * self._config.heartbeat_s)):
                    held = await self._held.get()
                    while held.number != self._holds:  # the answer to one that was given up
                        held = await self._held.get()
                    if held.identity is not None:
                        return WeightVersion(*held.identity)
                    deadline = min(time.monotonic() + HOLD_TIMEOUT_S, started_s + self._config.update_timeout_s)
                    await asyncio.sleep(_CONNECT_RETRY_S)
        raise WaitTimeout("the receiver process to hold the newest weights", HOLD_TIMEOUT_S, "Is it alive")

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                group.create_task(self._keep_connected())
        except* Exception as failures:
            cause = root_cause(failures)
            if isinstance(cause, WaitTimeout | PublisherLost):
                # These two mean that weights may still come. Now none will, because this task has ended.
                cause = WeightsError(f"no weights are received any more: {cause}")
            self._failure = cause
            await self._notify()  # wait_for_newer_version raises it

    async def _follow(self) -> None:
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
            self._send(ServerHello(name=self._name, has=self._taken, holding=self._holding))
            if self._address is not None:
                self._send(FollowPublisher(address=self._address))
            await self._listen(reader)
            self._writer.close()
            self._writer = None
            self.restarts += 1
            log.warning("the receiver process of this machine ended; finding or starting another")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the running process, or start one. Raises WeightsError, WaitTimeout if it does not start, and
        ConfigError if another user could be listening there."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            make_private_folder(self.store_path.parent)
            with suppress(OSError):
                return await asyncio.open_unix_connection(self._paths.socket)
            if self._process is not None and self._process.poll() not in (None, 0) and self.restarts == 0:
                raise WeightsError(
                    f"the receiver process ended with code {self._process.returncode} before it was ready; "
                    "its messages are in this server's log."
                )
            if (started := start_receiver(self._paths, self._config)) is not None:
                self._process = started
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
                    "it of another release? Stop all rollout servers of the run on this machine, and start them with "
                    "one release"
                ) from error
            match message:
                case ReceiverState():
                    self._state, self.stats = message, message.stats
                    await self._notify()
                case Held():
                    self._held.put_nowait(message)
                case Failed(message=text, corrupt=corrupt):
                    raise WeightsCorrupt(text) if corrupt else WeightsError(text)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _send(self, message: Record) -> None:
        """Send if connected; everything that matters is sent again after a reconnect."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack_message(message))
