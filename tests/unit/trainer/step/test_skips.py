"""Steps that are skipped: counted, dumped, and after too many in a row the end."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from async_grpo.errors import NonFiniteStep, TrainingError
from async_grpo.wire import Batch, Group, Task, records, tokens_to_bytes
from tests.support.buffer_cases import mixed_sample
from trainer.step.skipped_steps import KEPT, SkippedSteps

FAULT = NonFiniteStep("the gradient norm is inf")


def batch_of(version: int) -> Batch:
    task = Task(index=0, prompt="one and one", prompt_tokens=tokens_to_bytes([7, 8]), answer="2")
    group = Group(seq=version, attempt=1, task=task, samples=[mixed_sample(1, 3, 6)])
    return Batch(epoch=1, version=version, groups=[group])


@pytest.mark.parametrize("writes", [True, False])
def test_as_many_in_a_row_as_are_allowed_stop_every_rank_and_the_last_dump_is_named(
    tmp_path: Path, writes: bool
) -> None:
    skipped_steps = SkippedSteps(tmp_path / "dumps", limit=3, writes=writes)
    skipped_steps.record_skip(batch_of(0), FAULT)
    skipped_steps.record_skip(batch_of(1), FAULT)
    with pytest.raises(TrainingError, match=r"3 steps .*norm is inf") as ended:
        skipped_steps.record_skip(batch_of(2), FAULT)
    assert (tmp_path / "dumps").exists() == ("dumps/step-3.msgpack" in str(ended.value)) == writes


def test_a_step_that_is_made_begins_the_count_anew(tmp_path: Path) -> None:
    skipped_steps = SkippedSteps(tmp_path, limit=2, writes=True)
    for version in range(6):
        skipped_steps.record_skip(batch_of(version), FAULT) if version % 2 else skipped_steps.reset()
    assert skipped_steps.in_a_row == 1


def test_a_dump_has_the_batch_and_the_reason_and_needs_no_code_of_ours_to_be_read(tmp_path: Path) -> None:
    SkippedSteps(tmp_path, limit=2, writes=True).record_skip(batch_of(4), FAULT)
    dump = msgpack.unpackb((tmp_path / "step-5.msgpack").read_bytes())
    assert (dump["kind"], dump["step"], dump["reason"]) == ("dump", 5, "the gradient norm is inf")
    assert dump["batch"]["groups"][0]["task"]["prompt"] == "one and one"


@pytest.mark.parametrize("cause", ["too large", "no folder"])
def test_a_dump_that_cannot_be_written_is_told_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    folder = tmp_path / "dumps"
    if cause == "too large":
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 100)
    else:
        folder.write_text("")
    told = SkippedSteps(folder, limit=2, writes=True).record_skip(batch_of(4), FAULT)
    assert "could not be written" in told and "step-5.msgpack" in told


def test_only_the_newest_dumps_stay(tmp_path: Path) -> None:
    skipped_steps = SkippedSteps(tmp_path, limit=100, writes=True)
    for version in range(KEPT + 4):
        skipped_steps.record_skip(batch_of(version), FAULT)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{5 + place}.msgpack" for place in range(KEPT)}
