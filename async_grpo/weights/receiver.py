"""The rollout server's end of the weight plane: the newest weights, in shared memory.

    publisher --announce--> _run --fetch--> back slot (staged) --next_version--> active slot --mmap--> engine

One task, `_run`, waits for announcements and fetches; it looks the publisher up again every few
heartbeats, so that a restarted trainer on other ports is found and one of an older epoch left. It
fetches ahead into the back slot, replacing what nobody has asked for yet. `next_version` waits for
it and swaps the slots. What `next_version` returned stays untouched until it is called again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import PublisherLost, WaitTimeout, WeightsCorrupt
from async_grpo.weights.link import HEARTBEATS_OF_SILENCE, FetchInterrupted, PublisherLink
from async_grpo.weights.manifest import Identity, Layout, Manifest
from async_grpo.weights.store import WeightStore
from async_grpo.wire.board import PublisherAddress

Resolve = Callable[[], Awaitable[PublisherAddress | None]]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Totals since the start."""

    versions: int = 0
    interrupted: int = 0
    """Fetches given up: a newer version came, the publisher fell silent, or the time was up."""
    rerequests: int = 0
    """Chunks and manifests asked for more than once."""
    received_bytes: int = 0
    transfer_s: float = 0.0
    last_transfer_s: float = 0.0


class WeightReceiver:
    """Follows the newest publisher and keeps its newest version in a weight store at `store_path`."""

    def __init__(self, resolve: Resolve, store_path: Path, config: WeightsConfig) -> None:
        """Starts to receive; needs a running event loop. `resolve` says where the publisher listens."""
        self.store_path = store_path
        self.stats = ReceiverStats()
        self._resolve = resolve
        self._config = config
        self._store: WeightStore | None = None
        self._link: PublisherLink | None = None
        self._fetched: Identity | None = None
        self._staged = False
        self._changed = asyncio.Condition()
        self._failure: Exception | None = None
        self._task = asyncio.create_task(self._run(), name="weight-receiver")

    async def next_version(self, after: Identity | tuple[int, int] | None, timeout_s: float) -> Identity:
        """Wait for weights newer than `after`; they lie in the store at `store_path` when this returns.

        Raises WaitTimeout if there are none in time, PublisherLost if that is because the publisher
        has fallen silent, and whatever ended the receiver (WeightsCorrupt, ...).
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._failure or self._is_newer(after))
        except TimeoutError:
            raise self._explain_timeout(after, timeout_s) from None
        if self._failure is not None and not self._is_newer(after):
            raise self._failure
        return self._hand_out()

    async def close(self) -> None:
        """Stop receiving and remove the store. Safe to call twice."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self._store is not None:
            self._store.unlink()

    def _is_newer(self, after: tuple[int, int] | None) -> bool:
        """Whole weights newer than `after` are there, staged or handed out already."""
        best = self._fetched if self._staged else self._active
        return best is not None and (after is None or best > tuple(after))

    @property
    def _active(self) -> Identity | None:
        return self._store.identity if self._store else None

    def _hand_out(self) -> Identity:
        assert self._store is not None
        if self._staged:
            assert self._fetched is not None
            self._store.commit(self._fetched)
            self._staged = False
        assert self._store.identity is not None
        return self._store.identity

    def _explain_timeout(self, after: tuple[int, int] | None, timeout_s: float) -> Exception:
        wanted = f"weights newer than {Identity(*after)}" if after else "the first weights"
        if self._link is None:
            return WaitTimeout(f"{wanted} from a trainer that has not announced itself", timeout_s)
        silent_s = time.monotonic() - self._link.heard_s
        if silent_s > HEARTBEATS_OF_SILENCE * self._config.heartbeat_s:
            return PublisherLost(
                f"waited {timeout_s:g} s for {wanted}; the publisher of epoch {self._link.address.epoch} at "
                f"{self._link.address.announce} has been silent for {silent_s:.1f} s. Is the trainer alive?"
            )
        return WaitTimeout(f"{wanted} from {self._link.address.announce}, which is alive", timeout_s)

    async def _run(self) -> None:
        try:
            while True:
                await self._look_up()
                await self._follow(HEARTBEATS_OF_SILENCE * self._config.heartbeat_s)
        except Exception as error:
            self._failure = error
            await self._notify()  # next_version raises it
        finally:
            if self._link is not None:
                self._link.close()

    async def _look_up(self) -> None:
        """Connect to the publisher of the newest epoch, if it is another than so far."""
        address = await self._resolve()
        current = self._link.address if self._link else None
        if address is None or address == current or (current and address.epoch < current.epoch):
            return
        if self._link is not None:
            self._link.close()
        self._link = PublisherLink(address, self._config)
        await self._fetch(self._link)

    async def _follow(self, duration_s: float) -> None:
        deadline = time.monotonic() + duration_s
        while (remaining := deadline - time.monotonic()) > 0:
            if self._link is None:
                await asyncio.sleep(self._config.heartbeat_s)
                return
            announced = await self._link.announcement(remaining)
            if announced is not None and self._is_news(announced):
                await self._fetch(self._link)

    def _is_news(self, identity: Identity) -> bool:
        return self._fetched is None or identity > self._fetched

    async def _fetch(self, link: PublisherLink) -> None:
        """Fetch the newest version into the back slot, if it is news and comes whole in time.

        What does not is given up: the next announcement, or the next look-up, starts over with the
        newest manifest.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._config.update_timeout_s):
                manifest = await link.newest_manifest()
                if manifest is None or not self._is_news(manifest.identity):
                    return
                manifest.validate()
                self._staged = False
                await link.fetch(manifest, self._writable(manifest.layout))
        except FetchInterrupted:
            self._give_up()
        except TimeoutError:
            self._give_up()
            log.warning(
                "no whole version came in time; fetching the newest. Raise weights.update_timeout_s if this repeats",
                publisher=link.address.requests,
                timeout_s=self._config.update_timeout_s,
            )
        else:
            await self._stage(manifest, time.monotonic() - started)
        finally:
            self.stats = replace(self.stats, rerequests=self.stats.rerequests + link.take_rerequests())

    def _give_up(self) -> None:
        """What was fetched in part is forgotten; what was staged whole before stays."""
        if not self._staged:
            self._fetched = self._active
        self.stats = replace(self.stats, interrupted=self.stats.interrupted + 1)

    async def _stage(self, manifest: Manifest, seconds: float) -> None:
        self._fetched, self._staged = manifest.identity, True
        self.stats = replace(
            self.stats,
            versions=self.stats.versions + 1,
            received_bytes=self.stats.received_bytes + manifest.layout.total_bytes,
            transfer_s=self.stats.transfer_s + seconds,
            last_transfer_s=seconds,
        )
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _writable(self, layout: Layout) -> memoryview:
        """The back slot; the store is made for the first layout that comes and keeps it."""
        if self._store is None:
            self._store = WeightStore.create(self.store_path, layout)
        if self._store.layout != layout:
            raise WeightsCorrupt(
                "the publisher's tensors are not those that this receiver started with; nothing was applied. "
                "Restart the rollout servers together with a trainer of another model."
            )
        return self._store.begin()
