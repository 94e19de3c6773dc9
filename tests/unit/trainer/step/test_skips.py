"""Skipped steps are counted and dumped, and too many in a row end the run."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from async_grpo.errors import NonFiniteStep, TrainingError
from async_grpo.wire import Batch, Group, Task, records, tokens_to_bytes
from tests.support.buffer_cases import mixed_sample
from trainer.step.skipped_steps import MAX_DUMPS, SkippedSteps

FAULT = NonFiniteStep("the gradient norm is inf")


def batch_of(version: int) -> Batch:
    task = Task(index=0, prompt="one and one", prompt_tokens=tokens_to_bytes([7, 8]), answer="2")
    group = Group(seq=version, attempt=1, task=task, samples=[mixed_sample(1, 3, 6)])
    return Batch(epoch=1, version=version, groups=[group])


@pytest.mark.parametrize("writes", [True, False])
def test_too_many_skips_in_a_row_stop_every_rank_and_name_the_last_dump(tmp_path: Path, writes: bool) -> None:
    skipped_steps = SkippedSteps(tmp_path / "dumps", limit=3, writes_dumps=writes)
    skipped_steps.record_skip(batch_of(0), FAULT)
    skipped_steps.record_skip(batch_of(1), FAULT)
    with pytest.raises(TrainingError, match=r"3 steps .*norm is inf") as ended:
        skipped_steps.record_skip(batch_of(2), FAULT)
    assert (tmp_path / "dumps").exists() == ("dumps/step-3.msgpack" in str(ended.value)) == writes


def test_a_trained_step_resets_the_count(tmp_path: Path) -> None:
    skipped_steps = SkippedSteps(tmp_path, limit=2, writes_dumps=True)
    for version in range(6):
        if version % 2:
            skipped_steps.record_skip(batch_of(version), FAULT)
        else:
            skipped_steps.reset()
    assert skipped_steps.consecutive == 1


def test_a_dump_has_batch_and_reason_and_is_plain_msgpack(tmp_path: Path) -> None:
    SkippedSteps(tmp_path, limit=2, writes_dumps=True).record_skip(batch_of(4), FAULT)
    dump = msgpack.unpackb((tmp_path / "step-5.msgpack").read_bytes())
    assert (dump["kind"], dump["step"], dump["reason"]) == ("dump", 5, "the gradient norm is inf")
    assert dump["batch"]["groups"][0]["task"]["prompt"] == "one and one"


@pytest.mark.parametrize("cause", ["too large", "no folder"])
def test_a_dump_that_cannot_be_written_is_reported_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    folder = tmp_path / "dumps"
    if cause == "too large":
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 100)
    else:
        folder.write_text("")
    message = SkippedSteps(folder, limit=2, writes_dumps=True).record_skip(batch_of(4), FAULT)
    assert "could not be written" in message and "step-5.msgpack" in message


def test_only_the_newest_dumps_are_kept(tmp_path: Path) -> None:
    skipped_steps = SkippedSteps(tmp_path, limit=100, writes_dumps=True)
    for version in range(MAX_DUMPS + 4):
        skipped_steps.record_skip(batch_of(version), FAULT)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{5 + index}.msgpack" for index in range(MAX_DUMPS)}
