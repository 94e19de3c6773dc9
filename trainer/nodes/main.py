"""One machine of a trainer that has several.

    python -m trainer.nodes.main --node-rank R --config runs/NAME/roles/trainer-R.yaml --model FOLDER

Exit code 0: the run is trained to its end, or SIGTERM was obeyed and a checkpoint holds what was trained. 1: see the
last line of the log; started again, on all machines, it resumes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from async_grpo.config import load
from async_grpo.errors import AsyncGrpoError
from trainer.nodes.node import Node


def main() -> None:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(prog="trainer.nodes.main", description="One machine of several.")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration of the run")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the first policy")
    parser.add_argument("--node-rank", type=int, required=True, help="which of trainer.nodes this is, from 0")
    arguments = parser.parse_args()
    config = load(arguments.config)
    try:
        asyncio.run(Node(config, arguments.config, arguments.model, arguments.node_rank).run())
    except AsyncGrpoError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
