"""The trainer process against a real buffer: killed, stopped, resumed, and brought to its end."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from async_grpo.config import load
from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.wire.board import ReplayProgress
from buffer import BufferStats
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.supply import command, supply, trained, write_config
from tests.support.waiting import until

STEPS, GROUPS = 8, 3
KILL_AT, STOP_AT = 3, 5
"""Versions at which the trainer gets SIGKILL and, once started again, SIGTERM. Checkpoints: 2, 4, 6, 8."""

PATIENCE_S = 180.0

LINGER_S = 2.0
"""So long the trainer is seen to stay before the final evaluation is on the board."""


@dataclass
class Story:
    """What is left when all is over."""

    run_dir: Path
    model: Path
    stats: BufferStats
    exit_codes: list[int] = field(default_factory=list)
    saved_at_stop: str = ""
    stays_for_the_evaluation: bool = False
    replay_after_the_kill: ReplayProgress | None = None

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.run_dir / "metrics.jsonl") if row["kind"] == "step"]


@pytest.fixture(scope="module", params=["whole batches", pytest.param("streamed", marks=pytest.mark.slow)])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_config: RedisConfig) -> Story:
    folder = tmp_path_factory.mktemp("run")
    trainer = {"streaming": request.param == "streamed", "checkpoint": {"every_steps": 2, "keep": 2}}
    sections = {"model": {"random": {}}, "trainer": trainer, "telemetry": {}}
    file = write_config(folder, "one", redis_config, steps=STEPS, groups=GROUPS, patience_s=60, **sections)
    model = make_model(folder, "qwen2")
    (model / "tokenizer.json").write_text("{}")
    return asyncio.run(lives(file, model))


async def lives(file: Path, model: Path) -> Story:
    """Three lives of the trainer beside one scripted rollout server."""
    config, codes = load(file), []
    checkpoints, log = config.run_dir / "checkpoints", config.run_dir / "trainer.log"
    trainer = ("trainer.main", "--config", file, "--model", model)
    async with supply(config) as run:
        enough_to_stop = asyncio.create_task(run.serve(STOP_AT))
        async with command(log, *trainer) as process:
            await until(lambda: trained(config) >= KILL_AT, PATIENCE_S)
            process.kill()
            codes.append(await process.wait())
        async with command(log, *trainer) as process:
            await until(lambda: trained(config) >= STOP_AT, PATIENCE_S)
            process.terminate()
            codes.append(await process.wait())
        replay = await run.board.replay_progress()
        saved_at_stop = (checkpoints / "latest").read_text().strip()
        await enough_to_stop
        the_rest = asyncio.create_task(run.serve(STEPS - STOP_AT))
        async with command(log, *trainer) as process:
            await until((checkpoints / "hf").exists, PATIENCE_S)
            await asyncio.sleep(LINGER_S)
            stays = process.returncode is None
            await run.evaluate()
            codes.append(await process.wait())
        await the_rest
        return Story(config.run_dir, model, await run.buffer.stats(), codes, saved_at_stop, stays, replay)


def test_sigkill_kills_and_sigterm_and_the_end_exit_with_zero(story: Story) -> None:
    assert story.exit_codes == [-signal.SIGKILL, 0, 0]


def test_sigterm_leaves_a_checkpoint_of_the_version_reached(story: Story) -> None:
    assert story.saved_at_stop == str(STOP_AT)


def test_every_step_is_trained_and_every_group_released_exactly_once(story: Story) -> None:
    assert {row["step"] for row in story.steps} == set(range(1, STEPS + 1))
    assert story.stats.released["trained"] == story.stats.released_total == STEPS * GROUPS
    assert story.stats.balanced
    last = story.steps[-1]
    assert last["released_groups"] == story.stats.released and last["buffer_groups"]["taken"] == 0


def test_no_token_is_older_than_the_bound(story: Story) -> None:
    assert max(row["age_max"] for row in story.steps) <= 1


def test_steps_that_are_replayed_after_the_kill_repeat_exactly(story: Story) -> None:
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in story.steps:
        by_step.setdefault(row["step"], []).append(row)
    repeated = [rows for rows in by_step.values() if len(rows) > 1]
    assert repeated
    for first, again in repeated:
        assert again["replayed"]
        assert again["epoch"] > first["epoch"]
        assert (again["loss"], again["grad_norm"]) == pytest.approx((first["loss"], first["grad_norm"]), rel=1e-6)


def test_how_far_they_are_replayed_is_on_the_board(story: Story) -> None:
    assert story.replay_after_the_kill is not None
    assert story.replay_after_the_kill.epoch == 2
    assert KILL_AT <= story.replay_after_the_kill.version == story.replay_after_the_kill.target <= STOP_AT


def test_the_probe_of_the_final_version_is_compared(story: Story) -> None:
    (probe,) = [row for row in read_rows(story.run_dir / "metrics.jsonl") if row["kind"] == "probe"]
    assert probe["version"] == STEPS
    assert 0 < probe["logprob_gap_mean"] <= probe["logprob_gap_max"]


def test_the_trainer_serves_the_final_weights_until_they_are_evaluated(story: Story) -> None:
    assert story.stays_for_the_evaluation
    assert [row for row in read_rows(story.run_dir / "metrics.jsonl") if row["kind"] == "warning"] == []


def test_the_export_is_a_hugging_face_folder_with_the_trained_weights(story: Story) -> None:
    folder = story.run_dir / "checkpoints" / "hf"
    assert (folder / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(folder)
    exported, before = load_file(folder / "model.safetensors"), load_file(story.model / "model.safetensors")
    assert exported.keys() == before.keys()
    assert not torch.equal(exported["model.norm.weight"], before["model.norm.weight"])
    assert model.config.tie_word_embeddings


def test_only_the_newest_checkpoints_are_kept(story: Story) -> None:
    folders = sorted(path.name for path in (story.run_dir / "checkpoints").iterdir() if path.is_dir())
    assert folders == ["00000006", "00000008", "hf"]


def test_the_timeline_has_every_phase(story: Story) -> None:
    names = {row["name"] for row in read_rows(story.run_dir / "timeline" / "trainer.jsonl")}
    assert {"wait", "train", "optimizer", "publish", "checkpoint"} <= names
