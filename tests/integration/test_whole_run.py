"""The whole loop on a tiny random policy: real Valkey, real vLLM, real Megatron-core, real ZMQ."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.whole_run import WholeRun, check_books

STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    run = WholeRun(tmp_path_factory.mktemp("whole"), steps=STEPS, overrides=("rollout.interruption=recompute",))
    run.start()
    try:
        assert run.wait() == 0, run.printed[-3000:]
        yield run
    finally:
        run.close()


def test_every_group_is_trained_once_and_in_time(finished: WholeRun) -> None:
    check_books(finished.summary(), steps=STEPS)


def test_engine_and_trainer_agree_on_every_log_probability(finished: WholeRun) -> None:
    summary = finished.summary()
    assert summary["gap_tokens"] > 0
    assert summary["logprob_gap_max"] < 1e-3


def test_the_summary_says_what_the_run_did(finished: WholeRun) -> None:
    summary = finished.summary()
    for key in ("accuracy_before", "accuracy_after", "generated_tokens", "trained_tokens", "wall_s", "mean_age"):
        assert summary[key] is not None, key
    assert summary["generated_tokens"] >= summary["trained_tokens"] > 0


def test_the_folder_holds_what_the_readme_promises(finished: WholeRun) -> None:
    folder = finished.run_dir
    for name in ("config.yaml", "metrics.jsonl", "report.md", "timeline.json", "plots/reward.png"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "samples").glob("*.jsonl"))
    assert list((folder / "tensorboard").iterdir())
    assert list((folder / "checkpoints" / "hf").glob("*.safetensors"))


def test_the_timeline_shows_both_sides(finished: WholeRun) -> None:
    events = json.loads((finished.run_dir / "timeline.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names >= {"trainer", "rollout-0"}


def test_the_same_command_again_says_that_the_run_is_finished(finished: WholeRun) -> None:
    finished.start()
    assert finished.wait(60) == 0
    assert "is finished" in finished.printed
