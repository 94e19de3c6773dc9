"""The bench of the training step. It runs `async_grpo.lab.bench.trainer.main` in a process of its own, because the
platform there replaces functions of torch.

    this process --start--> async_grpo.lab.bench.trainer.main --lines: rounds that are done--> progress bar
                                                              --file: figures--> list[Measurement]

It waits for lines of that process, and kills it if none comes for too long.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from rich.progress import Progress

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import TrainingError
from async_grpo.lab.bench.measure import Measurement
from async_grpo.lab.bench.rig import LineChild
from trainer.platform import select_platform

_ROUND_TIMEOUT_S = 600.0
_SHOWN_CHARACTERS = 2000


async def measure(progress: Progress, *, quick: bool, data: Path | None = None) -> list[Measurement]:
    """All figures; `quick` only shows that the bench works, on a tiny model. `data`: a JSON-lines file with GSM8K's
    fields, whose prompts are trained on. Raises TrainingError if the steps that are compared do not come to the same
    loss, WaitTimeout."""
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        out, log = Path(folder) / "figures.json", Path(folder) / "log"
        arguments = ["--out", str(out), *(["--quick"] if quick else []), *(["--data", str(data)] if data else [])]
        environment = {**select_platform("cpu").rank_environment(TrainerConfig()), **os.environ}  # as a trainer has it
        task = progress.add_task("training steps", total=None)
        with log.open("w") as stderr:
            child = LineChild("async_grpo.lab.bench.trainer.main", *arguments, env=environment, stderr=stderr)
            async with child:
                while line := await child.read("a round of the trainer's bench", _ROUND_TIMEOUT_S):
                    word, _, number = line.decode().strip().partition(" ")
                    if word == "total":
                        progress.update(task, total=int(number))
                    else:
                        progress.advance(task)
                code = await child.wait(_ROUND_TIMEOUT_S)
        if code:
            end = log.read_text()[-_SHOWN_CHARACTERS:]
            raise TrainingError(f"the bench of the trainer ended with exit code {code}:\n{end}")
        return [Measurement(**figure) for figure in json.loads(out.read_text())]
