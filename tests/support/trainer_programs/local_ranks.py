"""One of two ranks that find out whether they share the memory of rank 0.

    python -m tests.support.trainer_programs.local_ranks RANK FOLDER RUN

With STALE_STORE in its environment, a rank is on another machine: its /dev/shm is its own, and in it lies the store of
a trainer of this run that was killed. Both ranks write down which ranks are local; rank 0 also what is left in its
folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from async_grpo.weights.manifest import make_layout
from async_grpo.weights.shared_memory import run_folder, store_path
from async_grpo.weights.store import WeightStore
from trainer.shared_slots import connect_local_ranks

STALE_STORE = "STALE_STORE"
LAYOUT = make_layout([("weight", "float32", [4])])


def main() -> None:
    rank = int(sys.argv[1])
    folder = Path(sys.argv[2])
    run = sys.argv[3]
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    if rank == 0 or STALE_STORE in os.environ:
        WeightStore.create(store_path(run, "trainer"), LAYOUT)
    dist.barrier()
    local, link = connect_local_ranks(run_folder(run), 30.0)
    if rank == 0 and local == [0, 1]:
        link.send(1, 3, 1)
        assert link.receive([1], 3, "the shards") == {1: 1}
    elif rank == 1 and local == [0, 1]:
        assert link.receive([0], 3, "a slot") == {0: 1}
        link.send(0, 3, rank)
    left = sorted(path.name for path in run_folder(run).iterdir()) if rank == 0 else []
    (folder / f"found-{rank}.json").write_text(json.dumps({"local": local, "left": left}))
    dist.barrier()


if __name__ == "__main__":
    main()
