"""The whole loop on a tiny random policy: real Valkey, real vLLM, real Megatron-core, real ZMQ. While it runs and once
it is finished, `async-grpo eval` and `chat` ask it as a user would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from async_grpo.errors import AsyncGrpoError
from async_grpo.lab.evaluate.policy_source import find_live_run
from tests.support.whole_run import WholeRun, check_books

STEPS = 8
PROMPTS, SAMPLES = 16, 3
FEW = 3
"""Completions that may differ where batches of other sizes round differently (docs/evaluation.md)."""
JUDGE = """\
def score(completion, answer):
    return float(extract(completion) in ("0", "1"))

def extract(completion):
    return str(len(completion) % 4)

score.extract = extract
"""
"""A random policy is never right about sums; this has an opinion on whatever it writes."""


OVERRIDES = (
    "rewards.functions=[{name: 'odd_judge:score'}]",
    *(f"eval.samples={SAMPLES}", "eval.every_steps=4", "rollout.interruption=recompute"),
)


class Asked:
    """What a user got while the run went on."""

    def __init__(self, run: WholeRun) -> None:
        self.run = run
        self.evaluation = run.run_command("eval", "--live", "--samples", "2", "--prompts", "8", "--json", "live.json")
        self.chat = run.run_command("chat", "--live", "--prompt", "1+2=", "--max-tokens", "8", "--seed", "1")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "odd_judge.py").write_text(JUDGE)
    run = WholeRun(folder, steps=STEPS, overrides=OVERRIDES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNC_GRPO_ADMIN_TOKEN", "open sesame")
        run.start()
    try:
        run.until(lambda: server_of(run) is not None, "rollout server", 300.0)
        administer(run, "pause")  # or it may have ended before it is asked
        asked = Asked(run)
        administer(run, "resume")
        assert run.wait() == 0, run.printed[-3000:]
        yield asked
    finally:
        run.close()


@pytest.fixture(scope="module")
def finished(asked: Asked) -> WholeRun:
    return asked.run


def server_of(run: WholeRun) -> str | None:
    """Address of its rollout server, once that has announced itself."""
    try:
        return next(iter(asyncio.run(find_live_run(None, [], run.run_dir)).servers), None)
    except AsyncGrpoError:
        return None


def administer(run: WholeRun, what: str) -> None:
    headers = {"authorization": "Bearer open sesame"}
    answer = httpx.post(f"{server_of(run)}/admin/{what}", headers=headers, timeout=30)
    assert answer.status_code == 202, answer.text


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


@pytest.fixture(scope="module")
def evaluated(asked: Asked) -> dict[str, Any]:
    """The final checkpoint, by an engine of its own."""
    done = asked.run.run_command("eval", "--json", "final.json", "--save", "final.jsonl")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((asked.run.folder / "final.json").read_text())
    return {**found, "printed": done.stdout}


@pytest.mark.slow
def test_the_final_checkpoint_gives_what_the_run_has_stated(asked: Asked, evaluated: dict[str, Any]) -> None:
    summary = asked.run.summary()
    stated = summary["evaluations"][-1]
    assert stated["version"] == evaluated["policy"]["version"] == STEPS
    assert (evaluated["prompts"], evaluated["samples"]) == (stated["prompts"], stated["samples"]) == (PROMPTS, SAMPLES)
    assert evaluated["seed"] == summary["seed"]
    for count in ("prompts", "completions", "unjudged", "unextracted"):
        assert evaluated["figures"][count] == stated["figures"][count], count
    assert evaluated["figures"]["completions"] == PROMPTS * SAMPLES
    assert 0 < stated["sampled_accuracy"] < 1
    verdict = "The accuracies equal those in the run's report" if evaluated["agrees_with_the_run"] else "Measured"
    assert evaluated["stated_by_the_run"] == stated and verdict in evaluated["printed"]


@pytest.mark.slow
def test_its_figures_differ_from_those_of_the_run_by_a_few_completions_at_most(
    asked: Asked, evaluated: dict[str, Any]
) -> None:
    found, stated = evaluated["figures"], asked.run.summary()["evaluations"][-1]["figures"]
    assert found["mean"]["value"] == pytest.approx(stated["mean"]["value"], abs=FEW / (PROMPTS * SAMPLES))
    for name in ("majority", "greedy"):
        assert found[name]["value"] == pytest.approx(stated[name]["value"], abs=FEW / PROMPTS), name
    assert set(found["pass_at"]) == set(stated["pass_at"])
    for k, estimate in found["pass_at"].items():
        assert estimate["value"] == pytest.approx(stated["pass_at"][k]["value"], abs=FEW / PROMPTS), k


def test_the_milestones_have_mean_pass_majority_and_intervals(asked: Asked) -> None:
    evaluations = asked.run.summary()["evaluations"]
    assert len(evaluations) >= 3
    for entry in evaluations:
        figures = entry["figures"]
        assert set(figures["pass_at"]) == {"1", "2", "3"}
        for estimate in (figures["mean"], figures["majority"], figures["greedy"], *figures["pass_at"].values()):
            assert estimate["low"] <= estimate["value"] <= estimate["high"]
    report = (asked.run.run_dir / "report.md").read_text()
    assert "| version | prompts | mean@3 | pass@1 | pass@2 | pass@3 | maj@3 | greedy |" in report


@pytest.mark.slow
def test_every_completion_is_saved_with_what_was_made_of_it(asked: Asked, evaluated: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in (asked.run.folder / "final.jsonl").read_text().splitlines()]
    assert len(rows) == PROMPTS * (SAMPLES + 1)
    sampled = [row for row in rows if row["how"] == "sampled"]
    assert all(row["extracted"] == str(len(row["completion"]) % 4) for row in sampled)
    mean = sum(row["score"] for row in sampled) / len(sampled)
    assert mean == pytest.approx(evaluated["figures"]["mean"]["value"])


def test_the_live_run_is_evaluated_and_names_its_versions(asked: Asked) -> None:
    assert asked.evaluation.returncode == 0, asked.evaluation.stderr[-3000:]
    found = json.loads((asked.run.folder / "live.json").read_text())
    assert (found["prompts"], found["figures"]["completions"]) == (8, 16)
    versions = {int(version) for version in found["policy"]["tokens_by_version"]}
    assert versions and versions <= set(range(STEPS + 1))
    assert "olicy version" in asked.evaluation.stdout


def test_the_live_policy_replies(asked: Asked) -> None:
    assert asked.chat.returncode == 0, asked.chat.stderr[-3000:]
    assert "[policy version" in asked.chat.stderr
    assert asked.chat.stdout.endswith("\n")


@pytest.mark.slow
def test_a_resumable_checkpoint_is_exported_and_talks(asked: Asked) -> None:
    words = ("--checkpoint", str(asked.run.run_dir / "checkpoints" / f"{STEPS:08d}"))
    sampling = ("--temperature", "0", "--max-tokens", "8")
    done = asked.run.run_command("chat", *words, *sampling, "--prompt", "1+2=", "--answer", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"[policy version {STEPS}" in done.stderr
    assert "[reward " in done.stderr


def test_a_run_that_has_ended_is_not_live(asked: Asked) -> None:
    done = asked.run.run_command("eval", "--live")
    assert done.returncode == 1
    assert "is not running" in done.stderr and "Traceback" not in done.stderr


def test_the_same_command_again_says_that_the_run_is_finished(finished: WholeRun) -> None:
    finished.start()
    assert finished.wait(60) == 0
    assert "is finished" in finished.printed
