"""What the run loop lets the buffer forget, and when a copy that fails ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from async_grpo.config import validate
from async_grpo.errors import CheckpointError
from trainer import loop
from trainer.loop import TrainerRun


def make_run(monkeypatch: pytest.MonkeyPatch, **checkpoint: Any) -> TrainerRun:
    """A run at version 0 whose buffer has room and whose copies work."""
    monkeypatch.setattr(loop, "is_rank_zero", lambda: True)
    raw = {"name": "commits", "model": {"random": {}}, "runs_store": "file:///store"}
    config = validate(raw | {"trainer": {"checkpoint": checkpoint}}, "test")
    world = MagicMock()
    run = TrainerRun(config, Path(), world.policy, world.coordinator, world.checkpoints, world.logger, 0)
    run.resumable_versions = [0]
    world.checkpoints.uncopied_version = None
    world.coordinator.has_room.return_value = True
    return run


def commits(run: TrainerRun) -> list[int]:
    return [call.args[0] for call in run.coordinator.commit_checkpoint.call_args_list]  # type: ignore[attr-defined]


def save_versions(run: TrainerRun, *versions: int) -> None:
    for version in versions:
        run.checkpoints.poll_saved.return_value = version  # type: ignore[attr-defined]
        run.commit_saved_checkpoints(wait=True)


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({}, [0, 10, 20]),
        ({"resumable": 1}, [10, 20, 30]),
        ({"resumable": 3, "keep": 3}, [0, 0, 10]),
        ({"keep": 1}, [10, 20, 30]),
    ],
    ids=["two", "the newest", "three", "no more than are kept"],
)
def test_the_buffer_keeps_what_came_after_as_many_checkpoints_as_are_resumable(
    monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, int], expected: list[int]
) -> None:
    run = make_run(monkeypatch, **checkpoint)
    save_versions(run, 10, 20, 30)
    assert commits(run) == expected


def test_the_older_checkpoint_is_given_up_when_the_buffer_needs_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(monkeypatch)
    save_versions(run, 10, 20)
    run.free_buffer_space()
    assert commits(run) == [0, 10]
    run.coordinator.has_room.return_value = False  # type: ignore[attr-defined]
    run.free_buffer_space()
    run.free_buffer_space()
    assert commits(run) == [0, 10, 20]


def test_a_copy_that_fails_ends_the_run_only_when_the_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(monkeypatch)
    world: Any = run
    world.checkpoints.uncopied_version = 10
    world.checkpoints.poll_saved.return_value = None
    world.coordinator.can_train_uncommitted.return_value = True
    run.free_buffer_space()
    world.checkpoints.start_copy.assert_not_called()
    world.coordinator.can_train_uncommitted.return_value = False
    with pytest.raises(CheckpointError, match=r"version 10 .*file:///store.*no room left"):
        run.free_buffer_space()
    world.checkpoints.start_copy.assert_called_once_with()


def test_a_last_copy_that_fails_is_tried_again_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(monkeypatch)
    world: Any = run
    run.saved_version, world.checkpoints.uncopied_version = 0, 0
    world.checkpoints.poll_saved.return_value = None
    run.save_everything()
    world.checkpoints.start_copy.assert_called_once_with()
    (_, message), _ = world.logger.warn.call_args
    assert "checkpoint of version 0" in message


def test_a_first_publication_that_fails_closes_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(monkeypatch)
    exporter = MagicMock()
    exporter.publish_weights.side_effect = OSError("no room in /dev/shm")
    monkeypatch.setattr(loop, "WeightExporter", lambda *_: exporter)
    resume: Any = run.coordinator.resume_run
    resume.return_value.head_version = resume.return_value.lost_steps = 0
    with pytest.raises(OSError, match="no room"):
        loop.train(run)
    exporter.close.assert_called_once_with()
