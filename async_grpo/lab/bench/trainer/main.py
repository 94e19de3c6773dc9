"""The process of the trainer's bench.

    python -m async_grpo.lab.bench.trainer.main --out FIGURES.json [--quick] [--data FILE]

It is a process of its own because the platform of the CPU replaces functions of torch. On standard output it writes a
line `total N`, then a line for every round that is done. The file of `--out` gets a list of figures.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from async_grpo.config.trainer import TrainerConfig
from trainer.platform import select_platform


def main() -> None:
    """Entry point; see the module. Imports come late: the platform must be active before anything imports megatron."""
    arguments = _arguments()
    threads = len(os.sched_getaffinity(0))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU is measured, wherever this runs
    platform = select_platform("cpu")
    platform.activate(TrainerConfig(threads=threads))

    from async_grpo.lab.bench.trainer.measure import FULL, QUICK, measure
    from async_grpo.lab.bench.trainer.setup import open_setup
    from trainer.ranks.distributed import stop_ranks

    plan = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        setup = open_setup(
            platform, Path(folder), plan.model, plan.mix, room=plan.room, threads=threads, data=arguments.data
        )
        figures = measure(setup, plan, partial(print, flush=True))
    arguments.out.write_text(json.dumps([asdict(figure) for figure in figures]))
    stop_ranks()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("async_grpo.lab.bench.trainer.main", description="The bench of one training step.")
    parser.add_argument("--out", type=Path, required=True, help="file for the figures")
    parser.add_argument("--quick", action="store_true", help="only show that the bench works")
    parser.add_argument("--data", type=Path, help="JSON-lines file whose field `question` has the prompts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
