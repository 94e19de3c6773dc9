"""The trainer on one machine: the only one, or one of several.

    python -m trainer.nodes.main [--node-rank R] --config runs/NAME/roles.yaml --model FOLDER

Exit code 0: the run is trained to its end, or SIGTERM was obeyed and a checkpoint holds what was trained. 78: its
configuration, its data or what is installed is at fault. Otherwise that of the rank that has failed, or 1: see the last
line of the log; started again, on all machines, it resumes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from async_grpo.config import load
from async_grpo.errors import CONFIG_FAULTS, EXIT_CONFIG, AsyncGrpoError
from async_grpo.telemetry.log import configure_logging
from trainer.nodes.node import Node
from trainer.nodes.ranks import RankFailed


def main() -> None:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(prog="trainer.nodes.main", description="The trainer on one machine.")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration of the run")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the first policy")
    parser.add_argument("--node-rank", type=int, default=0, help="which of trainer.nodes this is, from 0")
    arguments = parser.parse_args()
    configure_logging("trainer")
    try:
        node = Node(load(arguments.config), arguments.config, arguments.model, arguments.node_rank)
        asyncio.run(node.run())
    except AsyncGrpoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(_exit_code(error))


def _exit_code(error: AsyncGrpoError) -> int:
    if isinstance(error, CONFIG_FAULTS):
        return EXIT_CONFIG
    return error.code if isinstance(error, RankFailed) else 1


if __name__ == "__main__":
    main()
