"""The process of the trainer's bench.

    python -m async_grpo.lab.bench.trainer.main --out FIGURES.json [--quick] [--truncated] [--data FILE]

It is a separate process because the CPU platform patches torch. On standard output it writes a line `total N`, then a
line per finished round. The file of `--out` gets a list of measurements.
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
    """Run the bench; see the module.

    Imports come late because the platform must be active before anything imports Megatron.
    """
    arguments = _parse_arguments()
    threads = len(os.sched_getaffinity(0))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the bench measures the CPU, also on machines with GPUs
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
        measurements = measure(setup, plan, partial(print, flush=True), truncated=arguments.truncated)
    arguments.out.write_text(json.dumps([asdict(measurement) for measurement in measurements]))
    stop_ranks()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("async_grpo.lab.bench.trainer.main", description="The bench of one training step.")
    parser.add_argument("--out", type=Path, required=True, help="file for the measurements")
    parser.add_argument("--quick", action="store_true", help="only check that the bench works")
    parser.add_argument("--truncated", action="store_true", help="also measure a step with sampling masks")
    parser.add_argument("--data", type=Path, help="JSON-lines file with prompts in the field `question`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
