"""Publishing from several ranks: the stall of training, and the time until two engines have the weights.

    ranks (trainer.weights) --own shards--> store --publisher, receiver--> store --> 2 engines in parallel
    baselines, same round     one memcpy of a shard in all ranks in parallel; a TCP loop, then both engines' copies

All ranks change all values before every version, which is sent dense. The TCP loop sends the same bytes piece by piece
into one small block, because the machine has no memory for another copy of the model. "Shared memory" is the size of
the stores; the receiver's store has one slot.
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
from async_grpo.lab.bench.rig import LineChild, request_all
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
    """Durations of one version, of the slowest rank or engine."""

    stall_s: float
    copied_s: float
    """From the rank's call until its shards are in the store."""
    memcpy_s: float
    applied_s: float
    """From the first rank's call until the second engine's last tensor."""
    tcp_s: float
    engines_s: float


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Bytes of the model and of the shared memory that holds it."""

    model: int
    trainer: int
    receiver: int


async def publish_from_ranks(ranks: int, layers: int, rounds: int, step: Step) -> list[Measurement]:
    """Measure `ranks` ranks with a Qwen2.5-1.5B of `layers` layers. Raises RoleFailed, WaitTimeout."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-grpo-bench-")))
        bench = RanksBench(ranks, layers, folder)
        stack.callback(bench.remove_stores)
        await bench.start(stack)
        measured = [await bench.measure_version(version, step) for version in range(1, WARM_UPS + rounds + 1)]
        sizes = bench.read_sizes()
    return _make_measurements(ranks, sizes, measured[WARM_UPS:])


class RanksBench:
    """The ranks, a receiver and the engines."""

    def __init__(self, ranks: int, layers: int, folder: Path) -> None:
        self._rank_arguments = [(str(rank), str(ranks), str(layers), str(folder)) for rank in range(ranks)]
        self._run: str | None = None
        """Name of the run, from rank zero's first answer."""

    async def start(self, stack: AsyncExitStack) -> None:
        """Start all processes and transfer version 0."""
        children = [LineChild(MODULE, *arguments) for arguments in self._rank_arguments]
        self._ranks = [await stack.enter_async_context(child) for child in children]
        self._engines = [await stack.enter_async_context(LineChild(MODULE, ENGINE)) for _ in range(ENGINES)]

        [rank_zero, *_] = await self._request(self._ranks, "publish", version=0)
        self._run = rank_zero["run"]
        epoch, announce, requests = rank_zero["address"]
        address = PublisherAddress(epoch=epoch, announce=announce, requests=requests)

        async def resolve() -> PublisherAddress:
            return address

        self._receiver = SharedWeightReceiver(resolve, self._store_path("node"), DENSE)
        stack.push_async_callback(self._receiver.close)
        await self._apply_version(0)

        self._store = WeightStore.open(self._store_path("trainer"))
        self._piece_bytes = min(PIECE_BYTES, self._store.layout.total_bytes)
        target = self._store_path("baseline")
        allocate_file(target, self._piece_bytes)
        self._tcp: TransferBaseline = await stack.enter_async_context(tcp(target))

    async def measure_version(self, version: int, step: Step) -> RanksRound:
        """Publish and apply one version, and time the baselines."""
        await self._request(self._ranks, "touch")
        memcpy_s = max(await self._request(self._ranks, "memcpy"))

        started_s = time.monotonic()
        answers, _ = await asyncio.gather(
            self._request(self._ranks, "publish", version=version), self._apply_version(version)
        )
        applied_s = time.monotonic() - started_s

        block = self._store.snapshot(WeightVersion(1, version)).block
        tcp_s = await self._time_tcp(block)
        engines_s = max(await self._load_version(version))
        step()
        return RanksRound(
            stall_s=max(answer["stall_s"] for answer in answers),
            copied_s=max(answer["copied_s"] for answer in answers),
            memcpy_s=memcpy_s,
            applied_s=applied_s,
            tcp_s=tcp_s,
            engines_s=engines_s,
        )

    def read_sizes(self) -> StoreSizes:
        """Return the sizes of the model, the trainer's store and the receiver's store."""
        return StoreSizes(
            model=self._store.layout.total_bytes,
            trainer=self._store_path("trainer").stat().st_size,
            receiver=self._store_path("node").stat().st_size,
        )

    def remove_stores(self) -> None:
        """Remove the stores of killed processes. Does nothing if no rank has started."""
        if self._run is not None:
            remove_stores(self._run)

    def _store_path(self, name: str) -> Path:
        assert self._run is not None
        return store_path(self._run, name)

    async def _apply_version(self, version: int) -> None:
        """Wait until the receiver has the version, and load it into all engines."""
        before = WeightVersion(1, version - 1) if version else None
        await self._receiver.wait_for_newer_version(before, WAIT_S)
        async with self._receiver.hold_newest():
            await self._load_version(version)

    async def _time_tcp(self, block: memoryview) -> float:
        """Return the seconds of sending `block`: its full pieces are timed, the remainder is extrapolated."""
        size = self._piece_bytes
        pieces = [block[start : start + size] for start in range(0, len(block) - size + 1, size)]
        piece_s = [await self._tcp.time_transfer(piece) for piece in pieces]
        return sum(piece_s) * len(block) / (size * len(pieces))

    async def _load_version(self, version: int) -> list[float]:
        """Have all engines copy the version. Returns the seconds of each."""
        path = str(self._store_path("node"))
        return await self._request(self._engines, "load", path=path, version=version)

    async def _request(self, children: Sequence[LineChild], name: str, **arguments: Any) -> list[Any]:
        requests: list[Mapping[str, Any]] = [{"ask": name, **arguments}] * len(children)
        return await request_all("the ranks or the engines of the bench", children, requests, WAIT_S)


def _make_measurements(ranks: int, sizes: StoreSizes, rounds: Sequence[RanksRound]) -> list[Measurement]:
    """Compare all rounds with their baselines."""
    setup = f"{ranks} ranks, {sizes.model / 1e9:.2f} GB"
    memcpy = "one memcpy of a shard, all ranks in parallel"
    both = f"TCP loop {median(entry.tcp_s for entry in rounds):.2f} s + both engines' copies"
    copies = [(1e3 * entry.copied_s, 1e3 * entry.memcpy_s) for entry in rounds]
    stalls = [(1e3 * entry.stall_s, 1e3 * entry.memcpy_s) for entry in rounds]
    applied = [(1e3 * entry.applied_s, 1e3 * (entry.tcp_s + entry.engines_s)) for entry in rounds]
    return [
        Measurement.paired(f"{setup}: until the shards are copied", "ms", copies, memcpy),
        Measurement.paired(f"{setup}: the trainer's stall", "ms", stalls, memcpy),
        Measurement.paired(f"{setup}: until {ENGINES} engines have it", "ms", applied, both),
        Measurement(f"{setup}: shared memory of the trainer", sizes.trainer / sizes.model, "copies"),
        Measurement(f"{setup}: shared memory of the receiver", sizes.receiver / sizes.model, "copies"),
    ]
