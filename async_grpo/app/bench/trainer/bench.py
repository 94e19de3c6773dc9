"""The bench of the training step. It runs `async_grpo.app.bench.trainer.main` in a process of its own, because the
platform there replaces functions of torch.

    this process --start--> async_grpo.app.bench.trainer.main --lines: rounds that are done--> progress bar
                                                              --file: figures--> list[Measurement]

It waits for lines of that process, and kills it if none comes for too long.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from rich.progress import Progress, TaskID

from async_grpo.app.bench.measure import Measurement
from async_grpo.app.launch.role_specs import kept_memory
from async_grpo.errors import TrainingError, WaitTimeout
from async_grpo.utils.child_process import child_argv

_ROUND_TIMEOUT_S = 600.0
_SHOWN_CHARACTERS = 2000


async def measure(progress: Progress, *, quick: bool, data: Path | None = None) -> list[Measurement]:
    """All figures; `quick` only shows that the bench works, on a tiny model. `data`: a JSON-lines file with GSM8K's
    fields, whose prompts are trained on. Raises TrainingError if the steps that are compared do not come to the same
    loss, WaitTimeout."""
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        out, log = Path(folder) / "figures.json", Path(folder) / "log"
        arguments = ["--out", str(out), *(["--quick"] if quick else []), *(["--data", str(data)] if data else [])]
        with log.open("w") as stderr:
            process = await asyncio.create_subprocess_exec(
                *child_argv([sys.executable, "-m", "async_grpo.app.bench.trainer.main", *arguments]),
                env=os.environ | kept_memory(os.environ),  # as a trainer has it
                stdout=PIPE,
                stderr=stderr,
            )
            try:
                await _follow(process, progress, progress.add_task("training steps", total=None))
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode:
            end = log.read_text()[-_SHOWN_CHARACTERS:]
            raise TrainingError(f"the bench of the trainer ended with exit code {process.returncode}:\n{end}")
        return [Measurement(**figure) for figure in json.loads(out.read_text())]


async def _follow(process: Process, progress: Progress, task: TaskID) -> None:
    assert process.stdout is not None
    while True:
        try:
            async with asyncio.timeout(_ROUND_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            raise WaitTimeout("a round of the trainer's bench", _ROUND_TIMEOUT_S) from None
        if not line:
            break
        word, _, number = line.decode().strip().partition(" ")
        if word == "total":
            progress.update(task, total=int(number))
        else:
            progress.advance(task)
    async with asyncio.timeout(_ROUND_TIMEOUT_S):
        await process.wait()
