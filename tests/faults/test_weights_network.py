"""Weights over a link of 100 Mbit/s between two namespaces: slow, cut, and with processes killed amid a transfer.

    namespace near: writer + publisher ====100 Mbit/s==== namespace far: readers, each with a receiver process

Whatever happens, every reader ends up with the newest version, and never maps a byte that was not published.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.weights import WeightsConfig
from async_grpo.utils.child_process import child_argv
from async_grpo.weights.shared_memory import remove_stores, store_path
from tests.support.network_namespaces import ADDRESSES, NotPermitted
from tests.support.slow_link import SlowLink, slow_link

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

RUN = f"test-weights-network-{os.getpid()}"
ROOT = Path(__file__).parents[2]
MEGABYTES = 24
"""Two seconds of the link."""
FEW_MEGABYTES = 8
CUT_S = 5.0
PATIENCE_S = 90.0
CONFIG = WeightsConfig(
    bind=f"tcp://{ADDRESSES[0]}:0", relay_bind=f"tcp://{ADDRESSES[1]}:0", chunk_bytes=256 << 10, request_timeout_s=3.0
)

Said = dict[str, Any]


class Child:
    """A writer or reader in its namespace; says one JSON line a version."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def order(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def hear(self) -> Said:
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await self._process.stdout.readline()
        assert line, "it ended"
        said: Said = json.loads(line)
        return said

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Plane:
    """One writer near, readers far; remembers what was published."""

    def __init__(self, link: SlowLink, folder: Path, config: WeightsConfig, megabytes: int) -> None:
        self.link = link
        self._megabytes = megabytes
        self._address = folder / "address"
        self._config = config
        self._children: list[Child] = []
        self._published: dict[int, Said] = {}
        self._writer: Child

    async def start(self) -> None:
        arguments = (RUN, str(self._address), self._config.model_dump_json(), str(self._megabytes))
        self._writer = await self._spawn(self.link.near, "weight_writer", *arguments)

    async def join(self) -> Child:
        """A reader of a machine of its own."""
        store = store_path(RUN, f"machine-{len(self._children)}")
        arguments = (str(store), str(self._address), self._config.model_dump_json(), str(sys.maxsize))
        return await self._spawn(self.link.far, "weight_reader", *arguments)

    async def publish(self, order: str) -> None:
        self._writer.order(order)
        said = await self._writer.hear()
        self._published[said["version"]] = said["hashes"]

    async def amid_a_transfer(self) -> None:
        """A third of a dense version is on its way."""
        goal = self.link.sent_bytes() + (MEGABYTES << 20) // 3
        async with asyncio.timeout(PATIENCE_S):
            while self.link.sent_bytes() < goal:
                await asyncio.sleep(0.02)

    async def newest(self, *readers: Child) -> list[Said]:
        """What each said of the newest version; everything it said on the way is checked as well."""
        return [await self._newest(reader) for reader in readers]

    async def close(self) -> None:
        for child in self._children:
            await child.end()

    async def _newest(self, reader: Child) -> Said:
        while True:
            said = await reader.hear()
            assert said["hashes"] == self._published[said["version"]], "torn"
            if said["version"] == max(self._published):
                return said

    async def _spawn(self, namespace: str, program: str, *arguments: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            *child_argv(self.link.command(namespace, sys.executable, "-m", f"tests.support.{program}", *arguments)),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._children.append(Child(process))
        return self._children[-1]


@pytest.fixture
def open_plane(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    @asynccontextmanager
    async def opened(*, rate: str = "100mbit", megabytes: int = MEGABYTES, **changes: object) -> AsyncIterator[Plane]:
        try:
            with slow_link(rate) as link:
                plane = Plane(link, tmp_path, CONFIG.model_copy(update=changes), megabytes)
                try:
                    await plane.start()
                    yield plane
                finally:
                    await plane.close()
        except NotPermitted as error:
            pytest.skip(str(error))

    yield opened
    remove_stores(RUN)


async def test_a_step_crosses_as_patches_in_a_small_part_of_the_bytes(open_plane: Callable[..., Any]) -> None:
    async with open_plane() as plane:
        reader = await plane.join()
        taken: dict[str, list[tuple[float, int]]] = {"new": [], "step": []}
        await plane.publish("new")
        [before] = await plane.newest(reader)
        for order in ("new", "step", "new", "step"):
            await plane.publish(order)
            started = time.monotonic()
            [said] = await plane.newest(reader)
            taken[order].append((time.monotonic() - started, said["received"] - before["received"]))
            before = said
        for order, figures in taken.items():
            print(order, "; ".join(f"{seconds:.2f} s, {received / 1e6:.2f} MB" for seconds, received in figures))
        assert all(received >= MEGABYTES << 20 for _, received in taken["new"])
        assert all(received < (MEGABYTES << 20) / 20 for _, received in taken["step"])


async def test_a_link_that_is_cut_for_five_seconds_amid_a_transfer_costs_no_version_and_no_byte(
    open_plane: Callable[..., Any],
) -> None:
    async with open_plane() as plane:
        reader = await plane.join()
        await plane.publish("step")
        await plane.newest(reader)
        await plane.publish("new")
        await plane.amid_a_transfer()
        plane.link.cut()
        await asyncio.sleep(CUT_S)
        await plane.publish("new")
        plane.link.mend()
        started = time.monotonic()
        await plane.newest(reader)
        print(f"newest {time.monotonic() - started:.2f} s after the link came back")


async def test_a_receiver_killed_amid_a_transfer_is_started_again_and_gets_the_newest(
    open_plane: Callable[..., Any],
) -> None:
    async with open_plane() as plane:
        reader = await plane.join()
        await plane.publish("new")
        [before] = await plane.newest(reader)
        await plane.publish("new")
        await plane.amid_a_transfer()
        os.kill(before["process"], signal.SIGKILL)
        started = time.monotonic()
        [after] = await plane.newest(reader)
        print(f"newest {time.monotonic() - started:.2f} s after the kill")
        assert after["process"] != before["process"]
        await plane.publish("step")  # the base that the new process took over is a base
        [last] = await plane.newest(reader)
        assert last["received"] - after["received"] < (MEGABYTES << 20) / 20


async def test_a_relay_killed_amid_a_transfer_is_replaced_and_everybody_gets_the_newest(
    open_plane: Callable[..., Any],
) -> None:
    async with open_plane(fanout=1) as plane:
        await plane.publish("new")
        chain = []
        for _ in range(3):
            chain.append(await plane.join())
            await plane.newest(chain[-1])
        sent = plane.link.sent_bytes()
        await plane.publish("new")
        before = await plane.newest(*chain)
        copies = (plane.link.sent_bytes() - sent) / (MEGABYTES << 20)
        assert copies < 1.5, "the chain does not relay"
        assert [said["relayed"] > 0 for said in before] == [True, True, False]
        await plane.publish("new")
        await plane.amid_a_transfer()
        os.kill(before[0]["process"], signal.SIGKILL)
        started = time.monotonic()
        await plane.newest(*chain)
        print(f"{copies:.2f} copies over the link; newest everywhere {time.monotonic() - started:.2f} s after the kill")


async def test_chunks_that_queue_on_a_slow_link_are_not_asked_for_twice(open_plane: Callable[..., Any]) -> None:
    """All that three receivers want is under way at once, 20 seconds of this link; a request may take three."""
    async with open_plane(rate="10mbit", megabytes=FEW_MEGABYTES, fanout=0, credits=32) as plane:
        readers = [await plane.join() for _ in range(3)]
        await plane.publish("new")
        started = time.monotonic()
        await plane.newest(*readers)
        copies = plane.link.sent_bytes() / (FEW_MEGABYTES << 20)
        print(f"{copies:.2f} copies over the link for 3 receivers, {time.monotonic() - started:.2f} s")
        assert copies < 3.5
