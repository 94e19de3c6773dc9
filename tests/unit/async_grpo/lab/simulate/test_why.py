"""The cause of a slow run is found in its files, for one planted cause after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_grpo.lab.simulate.calibrate import measure_run
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.recorded import read_recorded
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings, VerifierTimings
from async_grpo.lab.simulate.why import WaitStage, explain_run
from async_grpo.telemetry.bottleneck import ADVICE, MEANINGS, Bottleneck, Cause, find_bottleneck
from async_grpo.telemetry.idle import rollout_idle_share, trainer_idle_share
from async_grpo.telemetry.jsonl import read_rows
from tests.support.recorded_runs import recorded_run

BALANCED = Timings(
    prompt_tokens=20,
    lengths=LengthModel(kind="lognormal", mean=60, sigma=0.3, cap=200),
    engine=EngineTimings(step_s=0.004, request_s=0.0001, prefill_s=0.0, call_s=0.003),
    trainer=TrainerTimings(base_s=0.3, token_s=2e-5, take_s=0.002),
    sync=SyncTimings(stall_s=0.01, transfer_s=0.01, load_s=0.01),
    verifier=VerifierTimings(latency_s=0.002),
)
LONG = LengthModel(kind="lognormal", mean=40, sigma=1.3, cap=200)
TRAINERS_OWN = {Cause.COMPUTING, Cause.CHECKPOINTS, Cause.PUBLISHING}
PLANTED: dict[Cause, tuple[int, dict[str, Any], dict[str, Any]]] = {
    Cause.COMPUTING: (2, {"trainer": TrainerTimings(base_s=3.0)}, {}),
    Cause.CHECKPOINTS: (
        2,
        {"trainer": TrainerTimings(base_s=0.5, token_s=0, checkpoint_s=2.0)},
        {"trainer": {"checkpoint": {"every_steps": 1}}},
    ),
    Cause.PUBLISHING: (2, {"sync": SyncTimings(stall_s=2.0)}, {}),
    Cause.WEIGHTS: (2, {"sync": SyncTimings(stall_s=0.01, transfer_s=0.01, load_s=1.5)}, {}),
    Cause.VERIFIERS: (2, {"verifier": VerifierTimings(sample_s=0.05)}, {}),
    Cause.WINDOW: (0, {"lengths": LengthModel(mean=60)}, {"rollout": {"max_concurrency": 256}}),
    Cause.TAIL: (0, {"lengths": LONG}, {}),
    Cause.SLOTS: (2, {}, {"rollout": {"max_concurrency": 8}}),
    Cause.ENGINE: (2, {"engine": EngineTimings(step_s=0.02, request_s=0.0005)}, {}),
    Cause.TASKS: (2, {"task_s": 0.3}, {}),
    Cause.SLOW_SERVER: (2, {}, {"rollout": {"servers": 3, "max_concurrency": 32}, "slow": 8.0}),
    Cause.EVALUATION: (1, {}, {"eval": {"every_steps": 2, "prompts": 200, "samples": 8}}),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_named(cause: Cause, tmp_path: Path) -> None:
    max_staleness, timings, changed = PLANTED[cause]
    run = recorded_run(tmp_path, max_staleness, BALANCED.model_copy(update=timings), **changed)
    explanation = explain_run(run)
    assert explanation.cause is cause, explanation.list_shares()
    assert ADVICE[cause]


@pytest.mark.parametrize("cause", PLANTED)
def test_the_report_names_the_side_of_the_cause(cause: Cause, tmp_path: Path) -> None:
    max_staleness, timings, changed = PLANTED[cause]
    run = recorded_run(tmp_path, max_staleness, BALANCED.model_copy(update=timings), **changed)
    servers = [list(read_rows(file)) for file in sorted((run.path / "timeline").glob("rollout-*.jsonl"))]
    trainer, rollout = trainer_idle_share(run.steps[1:]), rollout_idle_share(run.steps[1:], servers)
    assert trainer is not None and rollout is not None
    verdict = find_bottleneck(trainer, rollout)
    assert (verdict is Bottleneck.TRAINING) == (cause in TRAINERS_OWN)
    assert (verdict is Bottleneck.TURNS) or ("max_staleness" not in ADVICE[cause])


def test_time_without_a_processor_is_separated_from_work(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, 1, BALANCED)
    (server,) = run.servers
    begin, end = server.groups[0].started_s, run.steps[-1]["time_s"]
    server.contended = [(begin, end, 0.6 * (end - begin))]
    computing_s = [row["train_s"] for row in run.steps]
    for row in run.steps:
        row["cpu_wait_s"] = 0.6 * row["train_s"]
    explanation = explain_run(run)
    assert explanation.cause is Cause.CPU
    assert explanation.trainer[Cause.COMPUTING] == pytest.approx(0.4 * sum(computing_s[1:]))
    generation = {part.cause: part.seconds for part in explanation.parts if part.stage is WaitStage.GENERATION}
    assert generation[Cause.CPU] == pytest.approx(0.6 * sum(generation.values()), rel=0.05)
    assert explanation.servers[0].contended == pytest.approx(0.6)
    assert sum(share for _, _, share in explanation.list_shares()) == pytest.approx(1.0, abs=0.01)


def test_spans_without_tasks_show_task_starvation(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, 2, BALANCED.model_copy(update={"task_s": 0.3}))
    for row in run.steps:
        row["buffer_groups"] = {"waiting": 1}  # at the end of the step, which is too late
    assert explain_run(run).cause is not Cause.TASKS
    run.servers[0].starved = run.servers[0].ticket_waits
    assert explain_run(run).cause is Cause.TASKS


def test_an_outage_is_not_attributed_to_the_window(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, 2, BALANCED)
    before = explain_run(run)
    file = run.path / "timeline" / "rollout-0.jsonl"
    away_s, cut_s = 60.0, run.steps[20]["time_s"]
    rows = [shift_row(json.loads(line), cut_s, away_s) for line in file.read_text().splitlines()]
    rows += [{"track": "process", "name": "started", "start_s": at_s} for at_s in (0.0, cut_s + away_s / 2)]
    rows.append({"track": "wait", "name": "ticket", "start_s": cut_s + 1.0, "end_s": cut_s + away_s})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = run.path / "timeline" / "trainer.jsonl"
    lines = [shift_row(json.loads(line), cut_s, away_s) for line in trainer.read_text().splitlines()]
    trainer.write_text("".join(json.dumps(row) + "\n" for row in lines))
    metrics = run.path / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in steps[21:]:
        row["time_s"] += away_s
    for key in ("step_s", "wait_s"):
        steps[21][key] += away_s
    metrics.write_text("".join(json.dumps(row) + "\n" for row in steps))

    explanation = explain_run(read_recorded(run.path))
    assert explanation.cause is Cause.RESTART, explanation.list_shares()
    assert explanation.outages["rollout-0"] == pytest.approx(away_s, rel=0.1)
    assert explanation.waits.get(Cause.WINDOW, 0.0) == pytest.approx(before.waits.get(Cause.WINDOW, 0.0), abs=3.0)
    measured = measure_run(read_recorded(run.path)), measure_run(run)
    assert measured[0].tokens_per_s == pytest.approx(measured[1].tokens_per_s, rel=0.05)


def shift_row(row: dict[str, Any], cut_s: float, away_s: float) -> dict[str, Any]:
    """Shift the part of a span after `cut_s` by `away_s`; a span across `cut_s` becomes longer."""
    for key in ("start_s", "end_s"):
        row[key] += away_s if row[key] > cut_s else 0.0
    return row


def test_every_cause_has_a_meaning_and_advice() -> None:
    assert set(MEANINGS) == set(Cause) - TRAINERS_OWN
    assert set(ADVICE) == set(Cause)


def test_the_critical_path_adds_up_to_a_mean_step(tmp_path: Path) -> None:
    explanation = explain_run(recorded_run(tmp_path, 0, BALANCED))
    links = dict(explanation.critical_path())
    assert list(links)[-2:] == ["computing", "publishing"]
    assert sum(links.values()) == pytest.approx(explanation.seconds / explanation.steps, rel=0.02)


def test_the_last_steps_are_explained_separately(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, 1, BALANCED)
    for row in run.steps[:30]:
        row["checkpoint_s"], row["step_s"] = 50.0, row["step_s"] + 50.0
    assert explain_run(run).cause is Cause.CHECKPOINTS
    last = explain_run(run, last=8)
    assert (last.steps, last.trainer[Cause.CHECKPOINTS]) == (8, 0.0)
    assert last.cause is not Cause.CHECKPOINTS
    assert sum(share for _, _, share in last.list_shares()) == pytest.approx(1.0, abs=0.02)


def test_the_parts_add_up_to_the_time_of_the_steps(tmp_path: Path) -> None:
    explanation = explain_run(recorded_run(tmp_path, 1, BALANCED))
    assert sum(share for _, _, share in explanation.list_shares()) == pytest.approx(1.0, abs=0.01)
    assert explanation.other < 0.02 * explanation.seconds
