"""One of two ranks on two nodes: rank 1 sends tensors to rank 0, then half of them, and then dies.

    python -m tests.support.trainer_programs.streamed_shards RANK FOLDER

Rank 0 writes down what it came to: whether all is equal, and how the wait for the rest ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import trainer.shard_stream
from async_grpo.errors import NodeLost
from trainer.model.host_copy import HostCopy
from trainer.shard_stream import ShardStream

PIECE_BYTES = 4096
TIMEOUT_S = 2.0


def tensors() -> list[torch.Tensor]:
    """Less than a piece, much more, rows that are more, and a view that is not contiguous."""
    made = torch.Generator().manual_seed(0)
    shapes = [(3,), (1000, 7), (3, 5000), (64, 64)]
    *whole, cut = [torch.randn(shape, generator=made).to(torch.bfloat16) for shape in shapes]
    return [*whole, cut.chunk(2, 1)[1]]


def main() -> None:
    rank = int(sys.argv[1])
    folder = Path(sys.argv[2])
    trainer.shard_stream.BUFFER_BYTES = PIECE_BYTES
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    stream = ShardStream([1], TIMEOUT_S)
    sent = tensors()
    copy = HostCopy(torch.device("cpu"), None)
    if rank == 1:
        stream.send(sent, copy)
        stream.send(sent[:2], copy)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    targets = [torch.zeros_like(each) for each in sent]
    stream.receive(1, targets)
    found = {"equal": [torch.equal(target, each) for target, each in zip(targets, sent, strict=True)]}
    stream.receive(1, targets[:2])
    dist.barrier()
    try:
        stream.receive(1, targets[2:])
    except NodeLost as error:
        found["end"] = str(error)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
