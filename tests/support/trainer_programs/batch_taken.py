"""One of two ranks that take a batch of three groups, which is larger than a record may be, and then none.

    python -m tests.support.trainer_programs.batch_taken RANK FOLDER

Each rank writes down the batches that it has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from async_grpo.config import RunConfig, validate
from async_grpo.wire import Batch, encode, records
from buffer.memory import InMemoryBuffer
from tests.support.buffer_cases import admit, finish, tasks
from trainer import coordinator
from trainer.coordinator import Coordinator, SharedDevices

GROUPS = 3


async def full_buffer(config: RunConfig) -> InMemoryBuffer:
    buffer = InMemoryBuffer(config.replay_policy, lease_s=60.0, max_attempts=3)
    await buffer.put_tasks(tasks(0, GROUPS))
    await finish(buffer, *await admit(buffer, GROUPS))
    return buffer


async def no_board(*_: object) -> None:
    return None


def main() -> None:
    rank = int(sys.argv[1])
    folder = Path(sys.argv[2])
    trainer = {"take_timeout_s": 0.1, "processes": 2}
    raw = {"name": "large", "model": {"random": {}}, "groups_per_step": GROUPS, "max_staleness": 0, "trainer": trainer}
    config = validate(raw, "test")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    coordinator.open_run = full_buffer  # type: ignore[assignment]
    coordinator.connect_board = no_board  # type: ignore[assignment]
    run = Coordinator(config, SharedDevices(config))
    epoch = run.resume_run(0).epoch
    records.MAX_RECORD_BYTES = 400  # a group has some 200 bytes
    batches = [run.take_batch(0), run._take_and_broadcast(none_in_time)]
    (folder / f"rank-{rank}.json").write_text(json.dumps([facts(batch) for batch in batches]))
    assert epoch == 1
    dist.barrier()


async def none_in_time() -> None:
    return None


def facts(batch: Batch | None) -> object:
    if batch is None:
        return None
    return [batch.version, [group.seq for group in batch.groups], [encode(group).hex() for group in batch.groups]]


if __name__ == "__main__":
    main()
