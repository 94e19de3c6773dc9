"""A trainer resumes below the version that servers have: what its loop tells of itself, in order.

The loop alone: steps are made at once, and nothing is trained, published or written. The program's argument is the file
for the list of calls.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

from async_grpo.config import validate
from buffer.base import Resume
from trainer.platform import select_platform

RESUMED_AT, HEAD_VERSION = 2, 4
TOLD = ("logger.joined", "logger.step", "exporter.publish", "logger.serving")


def main() -> None:
    """Resume, replay, publish, and stop as if by SIGTERM."""
    select_platform("cpu").activate(1)
    from trainer import loop

    world = MagicMock()
    world.coordinator.resume.return_value = Resume(epoch=2, head_version=HEAD_VERSION)
    world.checkpoints.poll_saved.return_value = None
    world.step_runner.make.side_effect = [MagicMock()] * (HEAD_VERSION - RESUMED_AT) + [None]
    loop.WeightExporter = lambda *_: world.exporter
    loop.StepRunner = lambda *_: world.step_runner
    loop.step_row = lambda *_, **__: {}
    loop.is_leader = lambda: True
    config = validate({"name": "replayed", "steps": 9, "model": {"random": {}}}, "test")
    training = loop.TrainingLoop(
        config, Path(), world.policy, world.coordinator, world.checkpoints, world.logger, RESUMED_AT
    )
    training.run()
    Path(sys.argv[1]).write_text(json.dumps([name for name, *_ in world.mock_calls if name in TOLD]))


if __name__ == "__main__":
    main()
