"""summary.json, plots and report.md of a fabricated run folder."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.results import format_headline
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.app.report.run_report import samples_section, write_report
from async_grpo.app.report.summary import summarize
from async_grpo.config import RunConfig
from async_grpo.telemetry.jsonl import JsonLines, read_rows
from async_grpo.telemetry.rows import rows_of_kind
from async_grpo.telemetry.timeline import Timeline, merge_timelines
from async_grpo.wire.board import Estimate, EvalMetrics, Evaluation
from rollout_server.run_logger import RolloutLogger

STEPS = 120
PLOTS = ("held_out", "reward", "optimization", "staleness", "time_split", "throughput")
SOURCE = "a|`b`\x1b[31m\u202e\n| c"
HOSTILE = "</details><script>alert(1)</script>\n```\n# Not a heading\x1b[31m\u202e\n````\n![x](http://evil/x.png)"


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "made-up", "model": {"random": {}}, "steps": STEPS, **changes})


def step_row(step: int, rng: random.Random) -> dict[str, Any]:
    tokens = 2000 + rng.randrange(400)
    first, second = int(tokens * 0.5), int(tokens * 0.35)
    wait_s = max(0.0, rng.gauss(0.6, 0.3))
    return {
        "kind": "step",
        "step": step,
        "version": step,
        "epoch": 1,
        "time_s": 1.7e9 + step * 3.0,
        "reward_mean": 0.15 + 0.7 / (1 + math.exp(-(step - 50) / 14)) + rng.gauss(0, 0.05),
        "reward_std": 0.4,
        "loss": rng.gauss(0.0, 0.02),
        "grad_norm": 0.6 + rng.random() * 0.3,
        "lr": 1e-4,
        "age_mean": 0.65,
        "age_max": 2,
        "age_histogram": {"0": first, "1": second, "2": tokens - first - second},
        "trained_tokens": tokens,
        "logprob_gap_mean": 2e-6,
        "logprob_gap_max": 1e-5,
        "gap_tokens": first,
        "wait_s": wait_s,
        "pack_s": 0.4,
        "train_s": 1.2 + rng.random() * 0.2,
        "optimizer_s": 0.1,
        "publish_s": 0.08,
        "checkpoint_s": 0.5 if step % 10 == 0 else 0.0,
        "step_s": wait_s + 2.5,
    }


def write_rows(run_dir: Path) -> None:
    rng = random.Random(1)
    with JsonLines(run_dir / "metrics.jsonl") as metrics:
        for step in [*range(1, 61), *range(51, STEPS + 1)]:  # the trainer crashed at 60 and resumed from 50
            metrics.write(step_row(step, rng))
        metrics.write({"kind": "warning", "step": 60, "message": "all rewards of the step are equal"})
        gap = {"logprob_gap_mean": 3e-6, "logprob_gap_max": 2e-5, "gap_tokens": 5000}
        metrics.write({"kind": "probe", "version": STEPS, **gap})


def write_samples(run_dir: Path) -> None:
    with JsonLines(run_dir / "samples" / "rollout-0.jsonl") as samples:
        for version, text in ((90, "<answer>12</answer>"), (0, HOSTILE), (40, "hm"), (80, "x" * 5000)):
            completion = {"text": text, "reward": 1.0, "spans": [[version, 0, 5], [version + 1, 5, 9]]}
            samples.write({"prompt": "5 + 7 = ?", "answer": "12", "completions": [completion]})


def write_timeline(run_dir: Path) -> None:
    trainer = Timeline(run_dir / "timeline" / "trainer.jsonl", "trainer")
    trainer.span("loop", "wait", 100.0, 101.0, step=1)
    trainer.span("loop", "train", 101.0, 103.0, step=1)
    trainer.instant("weights", "publish", 103.0, version=1)
    rollout = Timeline(run_dir / "timeline" / "rollout-0.jsonl", "rollout-0")
    rollout.span("groups", "group 0", 99.5, 101.0)
    rollout.span("groups", "group 1", 100.0, 100.5)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_rows(tmp_path)
    write_samples(tmp_path)
    write_timeline(tmp_path)
    (tmp_path / "config.yaml").write_text("name: made-up\nseed: 1\n")
    (tmp_path / "run.json").write_text(json.dumps({"command": "async-grpo run configs/made-up.yaml"}))
    return tmp_path


def evaluation(version: int, sampled: float, greedy: float) -> Evaluation:
    mean = Estimate(sampled, sampled - 0.01, sampled + 0.02)
    source = EvalMetrics(prompts=9, completions=36, greedy=Estimate(greedy, greedy, greedy))
    return Evaluation(
        **{"version": version, "prompts": 256, "samples": 4, "sampled_accuracy": sampled, "greedy_accuracy": greedy},
        figures=EvalMetrics(prompts=256, completions=1024, unjudged=3, unextracted=version // 60, mean=mean),
        by_source={SOURCE: source} if version == STEPS else {},
        no_majority="step has none",
    )


@pytest.fixture
def summary(run_dir: Path) -> dict[str, Any]:
    rows = read_rows(run_dir / "metrics.jsonl")
    measured = ((120, 0.83, 0.88), (0, 0.14, 0.13), (40, 0.35, 0.41), (80, 0.71, 0.78))
    evaluations = [evaluation(version, sampled, greedy) for version, sampled, greedy in measured]
    released = {"trained": 1920, "stale": 0, "filtered": 7, "failed": 1}
    stats = {"admitted": 1960, "released": released, "inflight": 20, "ready": 12, "taken": 0}
    counters = {"generated_tokens": 300_000, "restarts.trainer": 1, "restarts.rollout-0": 2}
    return summarize(
        config(), rows_of_kind(rows, "step"), rows_of_kind(rows, "probe"), evaluations, stats, counters, 400.0
    )


def test_a_repeated_step_counts_once(summary: dict[str, Any]) -> None:
    assert summary["steps"] == STEPS
    assert sum(summary["tokens_by_age"].values()) == summary["trained_tokens"]


def test_accuracies_are_those_of_the_first_and_last_version(summary: dict[str, Any]) -> None:
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.14, 0.83)
    assert (summary["greedy_accuracy_before"], summary["greedy_accuracy_after"]) == (0.13, 0.88)


def test_a_server_outage_does_not_suggest_more_staleness() -> None:
    ends = [10.0, 20.0, 30.0, 70.0, 80.0, 90.0, 100.0, 110.0]  # a server was killed in the fourth step
    waits = [1.0, 1.0, 1.0, 38.0, 1.0, 1.0, 1.0, 1.0]
    steps = [
        {"step": n + 1, "time_s": end, "step_s": end - before, "wait_s": wait, "trained_tokens": 10}
        for n, (before, end, wait) in enumerate(zip([0.0, *ends], ends, waits, strict=False))
    ]
    times = [(0.0, 32.0), (68.0, 110.0)]
    server = [{"track": "generation", "name": "group 1", "start_s": start, "end_s": end} for start, end in times]
    processes = [{"track": "process", "name": "started", "start_s": start} for start in (0.0, 50.0)]
    summary = summarize(config(), steps, [], [], {}, {}, 110.0, servers=[[*processes, *server]])
    assert summary["trainer_idle"] > 0.3 and summary["rollout_idle"] > 0.3
    assert "max_staleness" not in summary["bottleneck"] and "rollout server restarted" in summary["bottleneck"]


def test_a_long_reason_is_shown_to_its_end(run_dir: Path, summary: dict[str, Any]) -> None:
    reason = (
        f"the reward function {'long_' * 12}name does not say which answer a completion gives (it has no `extract`)"
    )
    summary["evaluations"][-1]["no_majority"] = reason
    assert "(it has no 'extract')`." in write_report(run_dir, summary).read_text()


def test_the_report_has_scores_and_intervals_of_every_version(run_dir: Path, summary: dict[str, Any]) -> None:
    report = write_report(run_dir, summary).read_text()
    section = report.partition("## Held-out prompts")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows[0] == "| version | prompts | mean@4 |"
    assert [row.split(" | ")[0] for row in rows[2:6]] == ["| 0", "| 40", "| 80", "| 120"]
    assert "| 120 | 256 | 0.830 [0.820, 0.850] |" in rows
    assert "No maj@4: `step has none`. 3 completions could not be judged" in section
    assert (
        "In 2 completions the reward function failed to extract the answer" in section and "no vote in maj@4" in section
    )
    (source,) = (row for row in rows if "0.880 [0.880, 0.880]" in row)
    assert not {"\x1b", "\u202e"} & set(source) and source.count("`") == 2


def test_a_single_evaluation_of_an_older_release_has_no_after(tmp_path: Path) -> None:
    old = [Evaluation(version=0, prompts=8, samples=2, sampled_accuracy=0.5)]
    summary = summarize(config(), [], [], old, {}, {}, 1.0)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.5, None)
    assert "## Held-out" not in write_report(tmp_path, summary).read_text()


def test_the_gap_covers_age_0_and_probes_and_the_mean_age_is_weighted(summary: dict[str, Any]) -> None:
    tokens = {int(age): count for age, count in summary["tokens_by_age"].items()}
    assert summary["gap_tokens"] == tokens[0] + 5000
    assert summary["logprob_gap_max"] == 2e-5
    assert 2e-6 < summary["logprob_gap_mean"] < 3e-6
    assert summary["mean_age"] == pytest.approx((tokens[1] + 2 * tokens[2]) / sum(tokens.values()))
    assert summary["max_age"] == 2


def test_the_report_names_the_servers_that_were_given_up(tmp_path: Path) -> None:
    reason = "rollout-1 has not been ready for 300 s"
    summary = summarize(config(), [], [], [], {}, {}, 1.0, given_up={"rollout-1": reason})
    assert reason in write_report(tmp_path, summary).read_text()


def test_the_report_names_engines_without_captured_graphs(tmp_path: Path) -> None:
    logger = RolloutLogger(tmp_path, "rollout-1", samples_every=1)
    logger.record_engine_note("rollout-1 runs without captured graphs")
    logger.close()
    rows = read_rows(tmp_path / "timeline" / "rollout-1.jsonl")
    summary = summarize(config(), [], [], [], {}, {}, 1.0, servers=[rows])
    assert summary["engine_notes"] == {"rollout-1": "rollout-1 runs without captured graphs"}
    assert "rollout-1 runs without captured graphs" in write_report(tmp_path, summary).read_text()
    assert "without captured graphs: rollout-1" in format_headline({**summary, "steps": 1}, RunFolder(tmp_path))


def test_the_counters_balance_and_restarts_are_per_role(summary: dict[str, Any]) -> None:
    assert summary["balanced"] is True
    assert summary["groups"]["active"] == 32
    assert summary["groups"]["expired"] == 0
    assert summary["restarts"] == {"trainer": 1, "rollout-0": 2}
    stats = {"admitted": 10, "released": {"trained": 8}, "inflight": 1, "ready": 0, "taken": 0}
    assert summarize(config(), [], [], [], stats, {}, 1.0)["balanced"] is False


def test_a_run_without_steps_reports_that_nothing_was_trained(tmp_path: Path) -> None:
    summary = summarize(config(), [], [], [], {}, {}, 0.0)
    assert summary["accuracy_before"] is None and summary["max_age"] is None and summary["balanced"] is None
    report = write_report(tmp_path, summary).read_text()
    assert "# made-up" in report
    assert "Not measured: no step trained a completion of its own version" in report
    summary = summarize(config(), [], [], [], {"admitted": 0, "released": {}}, {}, 3.0)
    assert (summary["generated_tokens"], summary["balanced"]) == (0, None)
    assert format_headline(summary, RunFolder(tmp_path)) == (
        f"nothing was trained: no step was finished\nreport: {tmp_path / 'report.md'}"
    )
    assert "accounted for" not in write_report(tmp_path, summary).read_text()


def test_rows_with_nulls_and_missing_keys_are_tolerated(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": 1, "loss": None}, {"kind": "step"}, {"kind": "step", "step": 2, "step_s": 1.0}]
    with JsonLines(tmp_path / "metrics.jsonl") as metrics:
        for row in rows:
            metrics.write(row)
    summary = summarize(config(), rows, [{}], [], {"released": None}, {}, 1.0)
    assert summary["steps"] == 2
    assert write_report(tmp_path, summary).exists()


def test_weight_updates_are_split_into_transfer_pause_and_load(tmp_path: Path) -> None:
    parts = [(1.0, 0.2, 0.1), (3.0, 0.4, 0.3), (2.0, 9.0, 8.0)]
    servers = [
        [{"track": "weights", "name": "version 1", "args": {"transfer_s": transfer, "pause_s": pause, "load_s": load}}]
        for transfer, pause, load in parts
    ]
    summary = summarize(config(), [], [], [], {}, {}, 1.0, servers=servers)
    assert summary["weight_updates"] == {"updates": 3, "transfer_s": 2.0, "pause_s": 0.4, "load_s": 0.3}
    text = write_report(tmp_path, summary).read_text()
    assert "| transfer | 2.000 |" in text and "| pause | 0.400 |" in text and "| load | 0.300 |" in text


def test_a_run_of_an_older_release_has_no_weight_update_times(tmp_path: Path) -> None:
    old = [{"track": "weights", "name": "version 1", "start_s": 1.0, "end_s": 2.0}]
    summary = summarize(config(), [], [], [], {}, {}, 1.0, servers=[old])
    assert summary["weight_updates"]["pause_s"] is None
    assert "## Weight updates" not in write_report(tmp_path, summary).read_text()


def test_the_report_has_every_section_and_every_plot(run_dir: Path, summary: dict[str, Any]) -> None:
    merge_timelines(run_dir)
    text = write_report(run_dir, summary).read_text()
    assert "14.0% → 83.0%" in text
    assert "1,960 admitted = 1,920 trained + 0 stale + 7 filtered" in text
    assert "max age <= bound: 2 <= 2, kept" in text
    assert "async-grpo run configs/made-up.yaml" in text
    assert "ui.perfetto.dev" in text and "all rewards of the step are equal" in text
    for name in PLOTS:
        assert f"plots/{name}.png" in text
        picture = (run_dir / "plots" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and 5_000 < len(picture) < 100_000
    assert json.loads((run_dir / "summary.json").read_text()) == summary


def test_the_report_has_wall_time_parts_throughput_and_bottleneck(tmp_path: Path) -> None:
    spent = {"step_s": 10.0, "wait_s": 6.0, "train_s": 4.0, "trained_tokens": 500, "start_s": 0.0}
    rows = [{"kind": "step", "step": n, "time_s": 100.0 + 10 * n, **spent} for n in range(1, 9)]
    rows[0] |= {"start_s": 15.0, "trained_tokens": 9000}  # a head start of three steps does not count
    servers = [[{"track": "generation", "start_s": 0.0, "end_s": 500.0}]]
    summary = summarize(config(), rows, [], [], {}, {}, 120.0, prepare_s=46.0, servers=servers)
    assert (summary["tokens_per_s"], summary["first_timed_step"]) == (50.0, 4)
    with JsonLines(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(rows[0])
    text = write_report(tmp_path, summary).read_text()
    parts = "15 s until the first batch, 80 s of steps, 25 s for everything else"
    assert f"| 120 s ({parts}); before that, the first policy took 46 s |" in text
    assert (
        "| tokens trained per second of the steps | 50 |" in text
        and "| idle: trainer, and rollout servers | 60%, 0%" in text
    )
    assert "waited for rollouts 60% of its time" in text and "generation was the bottleneck" in text
    assert "| wait | 30.0 | 60% |" in text and "Steps 4 to 8: the first S + 1" in text


def test_the_report_starts_with_the_verdict_and_four_plots_and_folds_the_rest(
    run_dir: Path, summary: dict[str, Any]
) -> None:
    text = write_report(run_dir, summary).read_text()
    head, _, folded = text.partition("<details>")
    lines = [line for line in head.splitlines() if line.startswith("- **")]
    assert [line.partition("**")[2].partition("?")[0] for line in lines] == [
        "Is it learning",
        "Is it fast",
        "Is it sound",
        "What was run",
        "What next",
    ]
    assert "Yes.** Held-out accuracy rose: 14.0% → 83.0%" in lines[0]
    assert "3 restarts; 1 warning" in lines[2] and "trainer 1" in lines[3]
    assert head.count("](plots/") == 4 and folded.count("](plots/") == len(PLOTS) - 4
    assert text.count("<details>") == text.splitlines().count("</details>")
    assert "## Samples" in folded and "## Reproduce" in folded


def graded(version: int, mean: float, once: float) -> Evaluation:
    figures = EvalMetrics(
        prompts=9, completions=9, mean=Estimate(mean, 0.0, 1.0), pass_at={"1": Estimate(once, 0.0, 1.0)}
    )
    return Evaluation(version=version, prompts=9, samples=1, sampled_accuracy=mean, figures=figures)


def test_the_first_row_is_the_reward_for_graded_answers_or_without_evaluations(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward_mean": 0.25}, {"step": 2, "reward_mean": 1.5}]
    summary = summarize(config(), rows, [], [graded(0, 0.4, 0.1), graded(2, 1.25, 0.5)], {}, {}, 1.0)
    assert "| **held-out reward, sampled** | **0.400 → 1.250** |" in write_report(tmp_path, summary).read_text()
    assert "held-out reward (sampled) 0.400 -> 1.250" in format_headline(summary, RunFolder(tmp_path))
    summary = summarize(config(), rows, [], [graded(0, 0.4, 0.4)], {}, {}, 1.0)
    assert "held-out accuracy (sampled) 40.0%\n" in format_headline(summary, RunFolder(tmp_path))
    summary = summarize(config(), rows, [], [], {}, {}, 1.0)
    text = write_report(tmp_path, summary).read_text()
    assert "| **training reward, first and last tenth** | **0.250 → 1.500** |" in text
    assert "held-out accuracy" not in text
    assert "training reward 0.250 -> 1.500" in format_headline(summary, RunFolder(tmp_path))


def test_model_output_cannot_leave_its_code_block(run_dir: Path, summary: dict[str, Any]) -> None:
    lines = write_report(run_dir, summary).read_text().splitlines()
    opening = max(i for i, line in enumerate(lines) if line == "`````text")
    closing = lines.index("`````", opening)
    hostile = "\n".join(lines[opening + 1 : closing])
    assert "<script>" in hostile and "# Not a heading" in hostile
    outside = "\n".join(lines[:opening] + lines[closing:])
    assert "<script>" not in outside and "evil" not in outside
    assert "\x1b" not in hostile and "\u202e" not in hostile
    assert any("[... 4400 more characters]" in line for line in lines)


def test_samples_have_their_reference_answer(run_dir: Path) -> None:
    assert "Reference answer:\n\n```text\n12\n```" in samples_section(run_dir)
