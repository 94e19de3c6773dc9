"""Ranks that have found each other, and wait to be looked at.

    python -m tests.support.trainer_programs.gathered LOOKED_AT    the node; it starts two such ranks

They end when the file LOOKED_AT is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.support.trainer_programs.launching import launch


def main() -> None:
    looked_at = Path(sys.argv[1])
    if "RANK" not in os.environ:
        launch("gathered", 2, looked_at)
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    dist.barrier()
    while not looked_at.exists():
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
