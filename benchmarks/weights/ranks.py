"""The bench of publishing from several ranks: the trainer's stall, and the time until two engines have the weights.

    ranks (trainer.weights) --own shards--> store --publisher, receiver--> store --> 2 engines, at once
    baselines, same round     one memcpy of a shard, all ranks at once; a TCP loop, then both engines' copies

All ranks change all values before every version, which is sent dense. The TCP loop sends the same bytes piece by piece
into one piece of memory, because the machine would not hold another copy. Shared memory is what the stores take; the
receiver's has one slot.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from async_grpo.config.weights import WeightsConfig
from async_grpo.lab.bench.measure import Measurement, Step
from async_grpo.lab.bench.rig import LineChild, ask_all
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.shared_memory import allocate_file, remove_stores, store_path
from async_grpo.weights.store import WeightStore
from async_grpo.wire.board import PublisherAddress
from benchmarks.weights.baselines import WAIT_S, TransferBaseline, tcp
from benchmarks.weights.plane import WARM_UPS
from benchmarks.weights.rank import ENGINE, PIECE_BYTES

MODULE = "benchmarks.weights.rank"
ENGINES = 2
DENSE = WeightsConfig(encoding="dense", receiver_slots=1)


@dataclass(frozen=True, slots=True)
class RanksRound:
    """What one version took, in seconds."""

    stall_s: float
    copied_s: float
    memcpy_s: float
    applied_s: float
    """From the first rank's call to the second engine's last tensor."""
    tcp_s: float
    engines_s: float


async def publish_from_ranks(ranks: int, layers: int, rounds: int, step: Step) -> list[Measurement]:
    """The figures of `ranks` ranks with a Qwen2.5-1.5B of so many layers. Raises RoleFailed, WaitTimeout."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-grpo-bench-")))
        bench = RanksBench(ranks, layers, folder)
        stack.callback(bench.remove)
        await bench.open(stack)
        measured = [await bench.round(version, step) for version in range(1, WARM_UPS + rounds + 1)]
        sizes = bench.store_bytes()
    return _figures(ranks, sizes, measured[WARM_UPS:])


class RanksBench:
    """The ranks, a receiver and the engines."""

    def __init__(self, ranks: int, layers: int, folder: Path) -> None:
        self._rank_arguments = [(str(rank), str(ranks), str(layers), str(folder)) for rank in range(ranks)]
        self._run = ""

    async def open(self, stack: AsyncExitStack) -> None:
        """Start everything, and move the first version."""
        children = [LineChild(MODULE, *arguments) for arguments in self._rank_arguments]
        self._ranks = [await stack.enter_async_context(child) for child in children]
        self._engines = [await stack.enter_async_context(LineChild(MODULE, ENGINE)) for _ in range(ENGINES)]
        [first, *_] = await self._ask(self._ranks, "publish", version=0)
        self._run = first["run"]
        epoch, announce, requests = first["address"]
        address = PublisherAddress(epoch=epoch, announce=announce, requests=requests)

        async def resolve() -> PublisherAddress:
            return address

        self._receiver = SharedWeightReceiver(resolve, store_path(self._run, "node"), DENSE)
        stack.push_async_callback(self._receiver.close)
        await self._apply(0)
        self._store = WeightStore.open(store_path(self._run, "trainer"))
        self._piece_bytes = min(PIECE_BYTES, self._store.layout.total_bytes)
        target = store_path(self._run, "baseline")
        allocate_file(target, self._piece_bytes)
        self._tcp: TransferBaseline = await stack.enter_async_context(tcp(target))

    async def round(self, version: int, step: Step) -> RanksRound:
        """Move one version, and take the baselines."""
        await self._ask(self._ranks, "touch")
        memcpy_s = max(await self._ask(self._ranks, "memcpy"))
        started_s = time.monotonic()
        published, _ = await asyncio.gather(self._ask(self._ranks, "publish", version=version), self._apply(version))
        applied_s = time.monotonic() - started_s
        block = self._store.snapshot(WeightVersion(1, version)).block
        tcp_s = await self._tcp_s(block)
        engines_s = max(await self._load(version))
        step()
        return RanksRound(
            max(each["stall_s"] for each in published),
            max(each["copied_s"] for each in published),
            memcpy_s,
            applied_s,
            tcp_s,
            engines_s,
        )

    def store_bytes(self) -> tuple[int, int, int]:
        """Bytes of the model, of the trainer's store and of the receiver's."""
        stores = [store_path(self._run, name).stat().st_size for name in ("trainer", "node")]
        return self._store.layout.total_bytes, stores[0], stores[1]

    def remove(self) -> None:
        """Remove the stores that are left."""
        if self._run:
            remove_stores(self._run)

    async def _apply(self, version: int) -> None:
        """Wait for the version, and have all engines take it."""
        before = WeightVersion(1, version - 1) if version else None
        await self._receiver.wait_for_newer_version(before, WAIT_S)
        async with self._receiver.hold_newest():
            await self._load(version)

    async def _tcp_s(self, block: memoryview) -> float:
        """Seconds for all bytes of the block: those of as many whole pieces as it has, and the rest in proportion."""
        size = self._piece_bytes
        pieces = [block[at : at + size] for at in range(0, len(block) - size + 1, size)]
        return sum([await self._tcp.time_transfer(piece) for piece in pieces]) * len(block) / (size * len(pieces))

    async def _load(self, version: int) -> list[float]:
        path = str(store_path(self._run, "node"))
        return await self._ask(self._engines, "load", path=path, version=version)

    async def _ask(self, children: Sequence[LineChild], what: str, **facts: Any) -> list[Any]:
        requests: list[Mapping[str, Any]] = [{"ask": what, **facts}] * len(children)
        return await ask_all("the ranks or the engines of the bench", children, requests, WAIT_S)


def _figures(ranks: int, sizes: tuple[int, int, int], rounds: Sequence[RanksRound]) -> list[Measurement]:
    model, trainer, receiver = sizes
    name, memcpy = f"{ranks} ranks, {model / 1e9:.2f} GB", "one memcpy of a shard, all ranks at once"
    copies = [(1e3 * each.copied_s, 1e3 * each.memcpy_s) for each in rounds]
    stalls = [(1e3 * each.stall_s, 1e3 * each.memcpy_s) for each in rounds]
    applied = [(1e3 * each.applied_s, 1e3 * (each.tcp_s + each.engines_s)) for each in rounds]
    both = f"TCP loop {median(each.tcp_s for each in rounds):.2f} s + both engines' copies"
    return [
        Measurement.paired(f"{name}: until the shards are copied", "ms", copies, memcpy),
        Measurement.paired(f"{name}: the trainer's stall", "ms", stalls, memcpy),
        Measurement.paired(f"{name}: until {ENGINES} engines have it", "ms", applied, both),
        Measurement(f"{name}: shared memory of the trainer", trainer / model, "copies"),
        Measurement(f"{name}: shared memory of the receiver", receiver / model, "copies"),
    ]
