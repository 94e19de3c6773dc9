"""The bench of the training step, which runs in a separate process because the platform patches torch there.

    this process --start--> async_grpo.lab.bench.trainer.main --lines: finished rounds--> progress bar
                                                              --file: measurements------> list[Measurement]

It waits for the lines of that process and kills it if none comes for too long.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from rich.progress import Progress, TaskID

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import TrainingError
from async_grpo.lab.bench.measure import Measurement
from async_grpo.lab.bench.rig import LineChild
from trainer.platform import select_platform

_ROUND_TIMEOUT_S = 600.0
_SHOWN_CHARACTERS = 2000


async def measure(
    progress: Progress, *, quick: bool, data: Path | None = None, truncated: bool = False
) -> list[Measurement]:
    """Run the bench; `quick` only checks that it works, on a tiny model.

    `data` is a JSON-lines file with GSM8K's fields whose prompts are trained on. `truncated`: also measure a step with
    sampling masks. Raises TrainingError if the compared steps differ in loss, WaitTimeout if a round takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        out = Path(folder) / "figures.json"
        log = Path(folder) / "log"
        arguments = ["--out", str(out)]
        if quick:
            arguments.append("--quick")
        if truncated:
            arguments.append("--truncated")
        if data is not None:
            arguments += ["--data", str(data)]
        environment = {**select_platform("cpu").rank_environment(TrainerConfig()), **os.environ}  # as in a trainer
        task = progress.add_task("training steps", total=None)

        with log.open("w") as stderr:
            child = LineChild("async_grpo.lab.bench.trainer.main", *arguments, env=environment, stderr=stderr)
            async with child:
                await _show_rounds(child, progress, task)
                code = await child.wait(_ROUND_TIMEOUT_S)
        if code:
            log_end = log.read_text()[-_SHOWN_CHARACTERS:]
            raise TrainingError(f"the trainer bench ended with exit code {code}:\n{log_end}")
        return [Measurement(**fields) for fields in json.loads(out.read_text())]


async def _show_rounds(child: LineChild, progress: Progress, task: TaskID) -> None:
    """Advance the progress bar with every line until the child closes its output."""
    while True:
        line = await child.read_line("a round of the trainer bench", _ROUND_TIMEOUT_S)
        if not line:
            return
        word, _, number = line.decode().strip().partition(" ")
        if word == "total":
            progress.update(task, total=int(number))
        else:
            progress.advance(task)
