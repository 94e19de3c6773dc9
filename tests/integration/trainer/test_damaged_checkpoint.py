"""A run whose newest checkpoint has a flipped byte resumes from the one before it, with a real buffer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.app.launch.run_folder import choose_checkpoint
from async_grpo.config import RunConfig, load
from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import EXIT_CONFIG
from async_grpo.telemetry.jsonl import read_rows
from tests.support.trainer_programs.batches import make_task
from tests.support.trainer_programs.checkpoint_facts import flip_byte
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.supply import Supply, command, supply, trained, write_config
from tests.support.waiting import until

STEPS, GROUPS, DAMAGED, WHOLE = 8, 3, 6, 4
"""Checkpoints: 2, 4, 6, 8."""

PATIENCE_S = 180.0

pytestmark = pytest.mark.slow


@dataclass
class Run:
    """A trainer that has stopped at version DAMAGED, whose checkpoint was then damaged."""

    config: RunConfig
    trainer: tuple[object, ...]
    undamaged: Path
    """A copy of the checkpoint's tensors from before."""

    @property
    def log(self) -> Path:
        return self.config.run_dir / "trainer.log"

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(read_rows(self.config.run_dir / "metrics.jsonl"))

    def steps(self, epoch: int) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in self.rows if row["kind"] == "step" and row["epoch"] == epoch}

    def warnings(self) -> list[str]:
        return [row["message"] for row in self.rows if row["kind"] == "warning"]


def write_run(folder: Path, redis: RedisConfig, resumable: int) -> Run:
    trainer = {"checkpoint": {"every_steps": 2, "keep": 2, "resumable": resumable}}
    sections = {"model": {"random": {}}, "trainer": trainer, "telemetry": {}}
    file = write_config(folder, "damaged", redis, steps=STEPS, groups=GROUPS, patience_s=60, **sections)
    model = make_model(folder, "qwen2")
    (model / "tokenizer.json").write_text("{}")
    arguments = ("trainer.main", "--config", file, "--model", model)
    return Run(load(file), arguments, folder / "undamaged")


async def stop_and_damage(run: Run, served: Supply) -> None:
    """Train to version DAMAGED, stop by SIGTERM, and flip a byte of the newest checkpoint."""
    serving = asyncio.create_task(served.serve(DAMAGED))
    async with command(run.log, *run.trainer) as process:
        await until(lambda: trained(run.config) >= DAMAGED, PATIENCE_S)
        process.terminate()
        assert await process.wait() == 0
    await serving
    checkpoints = run.config.run_dir / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == str(DAMAGED)
    run.undamaged.write_bytes((checkpoints / f"{DAMAGED:08d}" / "__0_0.distcp").read_bytes())
    flip_byte(checkpoints / f"{DAMAGED:08d}" / "__0_0.distcp")


async def finish_run(run: Run, served: Supply, steps: int) -> None:
    """Train to the end. Groups come once the trainer has taken over, which may discard those from before."""
    before = (await served.buffer.stats()).epoch
    await served.evaluate()
    async with command(run.log, *run.trainer) as process:
        async with asyncio.timeout(PATIENCE_S):
            while (await served.buffer.stats()).epoch == before:
                await asyncio.sleep(0.1)
        serving = asyncio.create_task(served.serve(steps))
        assert await process.wait() == 0, run.log.read_text()[-3000:]
    await serving


async def test_it_resumes_from_the_checkpoint_before_it_bit_for_bit(tmp_path: Path, redis_config: RedisConfig) -> None:
    run = write_run(tmp_path, redis_config, resumable=2)
    async with supply(run.config) as served:
        await stop_and_damage(run, served)
        async with command(run.log, *run.trainer) as process:
            written_again = run.config.run_dir / "checkpoints" / f"{DAMAGED:08d}" / "manifest.json"
            await until(lambda: json.loads(written_again.read_text())["epoch"] == 2, PATIENCE_S)
            process.terminate()
            assert await process.wait() == 0
        again = run.config.run_dir / "checkpoints" / f"{DAMAGED:08d}" / "__0_0.distcp"
        assert again.read_bytes() == run.undamaged.read_bytes()
        await finish_run(run, served, STEPS - DAMAGED)
        stats = await served.buffer.stats()
    first, repeated = run.steps(epoch=1), run.steps(epoch=2)
    for step in (WHOLE + 1, DAMAGED):
        assert repeated[step]["replayed"]
        assert [repeated[step][name] for name in ("loss", "grad_norm")] == [
            first[step][name] for name in ("loss", "grad_norm")
        ]
    assert stats.balanced and stats.released["trained"] == STEPS * GROUPS
    (warning,) = run.warnings()
    assert f"{DAMAGED:08d} is damaged" in warning and f"resumes from version {WHOLE} instead" in warning


async def test_without_the_data_it_ends_for_good_and_goes_on_when_a_person_accepts_the_loss(
    tmp_path: Path, redis_config: RedisConfig
) -> None:
    run = write_run(tmp_path, redis_config, resumable=1)
    async with supply(run.config) as served:
        await stop_and_damage(run, served)
        async with command(run.log, *run.trainer) as process:
            assert await process.wait() == EXIT_CONFIG
        assert f"async-grpo resume RUN --from {WHOLE}" in run.log.read_text()

        assert choose_checkpoint(run.config.run_dir, str(WHOLE)) == WHOLE
        more = range(STEPS * GROUPS, STEPS * GROUPS + (DAMAGED - WHOLE) * GROUPS)
        await served.buffer.put_tasks([make_task(np.random.default_rng(index), index, 6) for index in more])
        await finish_run(run, served, STEPS - WHOLE)
        stats = await served.buffer.stats()
    assert [*run.steps(epoch=2)] == [*range(WHOLE + 1, STEPS + 1)]
    assert stats.balanced and stats.ended
    assert any(f"groups of {DAMAGED - WHOLE} steps after version {WHOLE}" in warning for warning in run.warnings())
