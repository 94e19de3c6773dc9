"""A rollout server that loads nothing: follows a run's weights and says, line by line, what it mapped.

    python -m tests.support.weight_reader STORE ADDRESS CONFIG LAST [BASE]

STORE lies in shared memory, ADDRESS is the file that will name the publisher, CONFIG is a WeightsConfig as JSON, BASE a
MergeBase. One JSON line a version, until version LAST.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import xxhash
from msgspec.structs import replace

from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.base import HeldWeights, MergeBase
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.source_reader import SourceReader
from async_grpo.wire import decode
from async_grpo.wire.board import PublisherAddress
from tests.support.speech import Speech

PATIENCE_S = 100.0


async def follow(store: Path, address: Path, config: WeightsConfig, last: int, base: MergeBase | None) -> None:
    async def resolve() -> PublisherAddress | None:
        return decode(address.read_bytes(), PublisherAddress) if address.exists() else None

    speech = Speech()
    receiver = SharedWeightReceiver(resolve, store, config)
    seen: WeightVersion | None = None
    while seen is None or seen.version < last:
        await receiver.wait_for_newer_version(seen, PATIENCE_S)
        async with receiver.hold_newest() as held:
            seen = held.identity
            hashes = hashes_of(replace(held, base=base))
        stats = receiver.stats
        line = {
            "version": seen.version,
            "hashes": hashes,
            "process": receiver.process_id,
            "patched": stats.patched_chunks,
            "dense": stats.dense_chunks,
            "received": stats.received_bytes,
            "relayed": stats.relayed_bytes,
        }
        speech.say(line)
    await receiver.close()


def hashes_of(held: HeldWeights) -> dict[str, str]:
    """Of every tensor, as an engine would load it."""
    snapshot = SourceReader().open(held)
    hashes = {spec.name: xxhash.xxh3_64_hexdigest(content) for spec, content in snapshot}
    snapshot.verify()
    return hashes


if __name__ == "__main__":
    store, address, config, last, *more = sys.argv[1:]
    base = msgspec.json.decode(more[0], type=MergeBase | None) if more else None
    asyncio.run(follow(Path(store), Path(address), WeightsConfig.model_validate_json(config), int(last), base))
