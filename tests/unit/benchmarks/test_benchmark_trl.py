"""The comparison with TRL: everything that is computed from the rows of both sides. Does not need TRL."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from async_grpo.config import RunConfig
from async_grpo.data.arithmetic import Problem
from async_grpo.errors import ConfigError, EngineError, RoleFailed
from async_grpo.lab.bench.pipeline.observe import Generated, RunRecord
from async_grpo.models.tiny.arithmetic import demonstration
from async_grpo.rewards.verifiers.answers import answer_tag
from benchmarks.trl import search, workloads
from benchmarks.trl.policies import MAX_ROUNDS, draw_rounds, write_checked_solution
from benchmarks.trl.search import Search, list_candidates
from benchmarks.trl.sides import (
    SideRun,
    TrlStep,
    compute_pace,
    make_our_steps,
    make_trl_command,
    make_trl_environment,
    make_trl_steps,
)
from benchmarks.trl.workloads import WORKLOADS, TrlSettings, Workload


def row(step: int, ended_s: float) -> TrlStep:
    return TrlStep(step, ended_s, samples=4, reward_mean=0.5, completion_tokens=40, busy_s=1.0)


def trl_line(step: int, time_s: float, *, samples: int = 4, reward: float = 0.5, generate_s: float = 3.0) -> str:
    fields = {"step": step, "time_s": time_s, "samples": samples, "reward_mean": reward, "generate_s": generate_s}
    return json.dumps({**fields, "completion_tokens": 10 * samples})


def our_row(step: int, time_s: float, epoch: int = 1) -> dict[str, float]:
    fields = {"step": step, "epoch": epoch, "time_s": time_s, "groups": 2, "reward_mean": 0.25}
    return {**fields, "completion_tokens_mean": 12.5, "step_s": 4.0, "wait_s": 1.5}


def group(start_s: float, end_s: float, tokens: int) -> Generated:
    return Generated(0, 0, tokens, (start_s, end_s))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_both_sides_get_the_same_configuration(name: str, tmp_path: Path) -> None:
    workload = WORKLOADS[name]
    workload.write_spec(tmp_path)
    spec, config = json.loads((tmp_path / "spec.json").read_text()), workload.make_config(tmp_path, name)
    assert RunConfig.model_validate(spec["config"]) == config and not config.data.shuffle
    assert (config.model.path, config.data.path) == (workload.model, workload.prompts)
    assert len(spec["learning_rates"]) == config.steps
    assert max(spec["learning_rates"]) == config.trainer.optimizer.lr
    assert TrlSettings(**spec["settings"]) == workload.trl_settings


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_steps_trained_from_a_lead_or_without_generation_do_not_count(workload: Workload) -> None:
    for staleness in (0, 2, 8):
        counted = workload.with_steps(50, staleness)
        expected = (50, max(workload.skip, staleness + 2), max(workload.tail, staleness + 1))
        assert (counted.steps, counted.skip, counted.tail) == expected
    with pytest.raises(ConfigError, match=r"12 steps, 10 .* 9 .*S = 8,.* --steps 24"):
        workload.with_steps(12, 8)


def test_trl_uses_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "CACHE", tmp_path)
    checks = WORKLOADS["checks"]
    assert checks.with_settings_for(8).trl_settings.threads == 8
    fastest = TrlSettings(rows=32, threads=1, processes=2)
    checks.settings_file(2).write_text(json.dumps(asdict(fastest)))
    assert checks.with_settings_for(2).trl_settings == fastest
    assert checks.with_settings_for(1).trl_settings.threads * checks.with_settings_for(1).trl_settings.processes == 1


def test_only_counted_steps_affect_the_pace() -> None:
    ends = [100.0, 101.0, 103.0, 105.0, 105.1]  # a slow start, two counted steps of 2 s, a fast end
    run = SideRun("x", 50.0, tuple(row(step, end) for step, end in enumerate(ends, 1)))
    counted = compute_pace(run, skip=2, tail=1)
    assert (counted.samples_per_s, counted.tokens_per_s, counted.step_s) == (2.0, 20.0, 2.0)
    assert (counted.busy_share, counted.tokens_mean) == (0.5, 10.0)
    assert run.start_up_s == 50.0
    with pytest.raises(ValueError, match=r"5 steps, 1 .* 4 "):
        compute_pace(run, skip=1, tail=4)


def test_completions_generated_before_the_clock_starts_do_not_count() -> None:
    steps = tuple(row(step, 10.0 * step) for step in range(1, 6))  # counted: 20 to 40, 80 tokens
    ahead = (group(0.0, 20.0, 60), group(15.0, 25.0, 40), group(30.0, 38.0, 20))
    counted = compute_pace(SideRun("ours", 0.0, steps, ahead), skip=2, tail=1)
    assert counted.generated == 0.5
    assert (counted.samples_per_s, counted.tokens_per_s) == (0.2, 2.0)
    more = compute_pace(SideRun("ours", 0.0, steps, (group(20.0, 40.0, 500),)), skip=2, tail=1)
    assert (more.generated, more.samples_per_s) == (6.25, 0.4)


def test_a_resumed_run_of_ours_is_rejected() -> None:
    steps = make_our_steps(RunRecord([our_row(1, 5.0), our_row(2, 9.0)], []), 8, "ours-S2")
    assert steps[1] == TrlStep(2, 9.0, samples=16, reward_mean=0.25, completion_tokens=200, busy_s=2.5)
    with pytest.raises(EngineError, match=r"ours-S2 .*again"):
        make_our_steps(RunRecord([our_row(1, 5.0), our_row(2, 9.0, epoch=2)], []), 8, "ours-S2")


def test_rows_of_all_trl_ranks_are_merged_per_step() -> None:
    first = [trl_line(1, 10.0, reward=1.0), trl_line(2, 20.0)]
    second = [trl_line(1, 11.0, samples=12, reward=0.0), trl_line(2, 21.0, generate_s=4.0)]
    steps = make_trl_steps([first, second])
    assert steps[0] == TrlStep(1, 11.0, samples=16, reward_mean=0.25, completion_tokens=160, busy_s=0.0)
    assert steps[1] == TrlStep(2, 21.0, samples=8, reward_mean=0.5, completion_tokens=80, busy_s=21.0 - 11.0 - 4.0)


def test_a_checked_solution_repeats_its_sums_and_stays_right() -> None:
    problem = Problem(478, 356)
    assert write_checked_solution(problem, 1) == demonstration(problem)
    assert write_checked_solution(problem, 3).count("8+6+0=14") == 3
    assert answer_tag(write_checked_solution(problem, 3), problem.answer) == 1.0


def test_rounds_have_a_long_tail() -> None:
    drawn = sorted(draw_rounds(random.Random(seed)) for seed in range(2000))
    assert (drawn[0], drawn[-1]) == (1, MAX_ROUNDS)
    assert drawn[1000] in (2, 3)
    assert sum(drawn) / len(drawn) < MAX_ROUNDS / 4


def test_every_candidate_divides_the_step_and_uses_all_cores() -> None:
    for samples in (64, 256):
        candidates = list(list_candidates(samples, cores=2))
        assert len(set(candidates)) == len(candidates)
        for settings in candidates:
            assert samples % settings.rows == 0 and settings.rows % settings.processes == 0
            assert settings.threads * settings.processes == 2


def test_the_search_ranks_candidates_and_leaves_out_those_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {8: 3.0, 16: 5.0, 64: 4.0}

    def speed(workload: Workload, out: Path) -> float:
        out.mkdir(parents=True)
        (out / "trl.log").write_text("Traceback\nRuntimeError: out of room\n")
        if workload.trl_settings.rows not in speeds:
            raise RoleFailed("trl ended with exit code 1.")
        return speeds[workload.trl_settings.rows] * workload.steps

    monkeypatch.setattr(search, "measure_speed", speed)
    console = Console(record=True, width=200)
    candidates = [TrlSettings(rows=rows, threads=2) for rows in (8, 16, 32, 64)]
    ranked = Search(WORKLOADS["tail"], tmp_path, console).rank_candidates(candidates, steps=3)
    assert [settings.rows for settings in ranked] == [16, 64, 8]
    shown = console.export_text()
    assert "15 samples/s in 3 steps" in shown and "does not run" in shown and "out of room" in shown
    with pytest.raises(RoleFailed, match="none of the settings"):
        Search(WORKLOADS["tail"], tmp_path / "none", console).rank_candidates(candidates[2:3], steps=3)


def test_torchrun_starts_the_ranks_with_their_number_of_threads() -> None:
    one, two = TrlSettings(rows=8, threads=2), TrlSettings(rows=8, threads=1, processes=2)
    assert "torch.distributed.run" not in make_trl_command(one, Path("spec.json"))
    started = "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.trl.trl_side spec.json"
    assert make_trl_command(two, Path("spec.json"))[1:] == started.split()
    assert (make_trl_environment(one)["OMP_NUM_THREADS"], make_trl_environment(two)["OMP_NUM_THREADS"]) == ("2", "1")
