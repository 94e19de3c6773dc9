"""The comparison with TRL: what is computed from the rows of both sides, without TRL."""

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
from benchmarks.trl.policies import MOST_ROUNDS, checked, rounds
from benchmarks.trl.search import Search, candidates
from benchmarks.trl.sides import SideRun, TrlStep, our_steps, pace, trl_argv, trl_environment, trl_steps
from benchmarks.trl.workloads import WORKLOADS, TrlDials, Workload


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
def test_both_sides_are_told_the_same_figures(name: str, tmp_path: Path) -> None:
    workload = WORKLOADS[name]
    workload.write_spec(tmp_path)
    spec, config = json.loads((tmp_path / "spec.json").read_text()), workload.config(tmp_path, name)
    assert RunConfig.model_validate(spec["config"]) == config and not config.data.shuffle
    assert (config.model.path, config.data.path) == (workload.model, workload.prompts)
    assert len(spec["learning_rates"]) == config.steps
    assert max(spec["learning_rates"]) == config.trainer.optimizer.lr
    assert TrlDials(**spec["dials"]) == workload.dials


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_what_an_asynchronous_run_generates_ahead_or_no_more_is_not_counted(workload: Workload) -> None:
    for staleness in (0, 2, 8):
        counted = workload.counting(staleness, 50)
        expected = (50, max(workload.skip, staleness + 2), max(workload.tail, staleness + 1))
        assert (counted.steps, counted.skip, counted.tail) == expected
    with pytest.raises(ConfigError, match=r"12 steps, 10 .* 9 .*S = 8,.* --steps 24"):
        workload.counting(8, 12)


def test_trl_gets_the_cores_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "CACHE", tmp_path)
    checks = WORKLOADS["checks"]
    assert checks.tuned(8).dials.threads == 8
    found = TrlDials(rows=32, threads=1, processes=2)
    checks.dials_file(2).write_text(json.dumps(asdict(found)))
    assert checks.tuned(2).dials == found
    assert checks.tuned(1).dials.threads * checks.tuned(1).dials.processes == 1


def test_the_pace_is_of_the_counted_steps_alone() -> None:
    ends = [100.0, 101.0, 103.0, 105.0, 105.1]  # a slow start, two counted steps of 2 s, a fast end
    run = SideRun("x", 50.0, tuple(row(step, end) for step, end in enumerate(ends, 1)))
    counted = pace(run, skip=2, tail=1)
    assert (counted.samples_per_s, counted.tokens_per_s, counted.step_s) == (2.0, 20.0, 2.0)
    assert (counted.busy_share, counted.tokens_mean) == (0.5, 10.0)
    assert run.start_up_s == 50.0
    with pytest.raises(ValueError, match=r"5 steps, 1 .* 4 "):
        pace(run, skip=1, tail=4)


def test_what_was_generated_before_the_clock_does_not_count() -> None:
    steps = tuple(row(step, 10.0 * step) for step in range(1, 6))  # counted: 20 to 40, 80 tokens
    ahead = (group(0.0, 20.0, 60), group(15.0, 25.0, 40), group(30.0, 38.0, 20))
    counted = pace(SideRun("ours", 0.0, steps, ahead), skip=2, tail=1)
    assert counted.generated == 0.5
    assert (counted.samples_per_s, counted.tokens_per_s) == (0.2, 2.0)
    more = pace(SideRun("ours", 0.0, steps, (group(20.0, 40.0, 500),)), skip=2, tail=1)
    assert (more.generated, more.samples_per_s) == (6.25, 0.4)


def test_our_steps_are_those_of_a_run_made_in_one_go() -> None:
    steps = our_steps(RunRecord([our_row(1, 5.0), our_row(2, 9.0)], []), 8, "ours-S2")
    assert steps[1] == TrlStep(2, 9.0, samples=16, reward_mean=0.25, completion_tokens=200, busy_s=2.5)
    with pytest.raises(EngineError, match=r"ours-S2 .*again"):
        our_steps(RunRecord([our_row(1, 5.0), our_row(2, 9.0, epoch=2)], []), 8, "ours-S2")


def test_ranks_of_trl_add_up_to_one_step() -> None:
    first = [trl_line(1, 10.0, reward=1.0), trl_line(2, 20.0)]
    second = [trl_line(1, 11.0, samples=12, reward=0.0), trl_line(2, 21.0, generate_s=4.0)]
    steps = trl_steps([first, second])
    assert steps[0] == TrlStep(1, 11.0, samples=16, reward_mean=0.25, completion_tokens=160, busy_s=0.0)
    assert steps[1] == TrlStep(2, 21.0, samples=8, reward_mean=0.5, completion_tokens=80, busy_s=21.0 - 11.0 - 4.0)


def test_a_checked_demonstration_is_right_and_longer_by_its_sums() -> None:
    problem = Problem(478, 356)
    assert checked(problem, 1) == demonstration(problem)
    assert checked(problem, 3).count("8+6+0=14") == 3
    assert answer_tag(checked(problem, 3), problem.answer) == 1.0


def test_rounds_are_many_now_and_then() -> None:
    drawn = sorted(rounds(random.Random(seed)) for seed in range(2000))
    assert (drawn[0], drawn[-1]) == (1, MOST_ROUNDS)
    assert drawn[1000] in (2, 3)
    assert sum(drawn) / len(drawn) < MOST_ROUNDS / 4


def test_every_candidate_of_the_search_divides_the_step_and_fills_the_cores() -> None:
    for samples in (64, 256):
        found = list(candidates(samples, cores=2))
        assert len(set(found)) == len(found)
        for dials in found:
            assert samples % dials.rows == 0 and dials.rows % dials.processes == 0
            assert dials.threads * dials.processes == 2


def test_the_search_puts_the_fastest_first_and_leaves_out_what_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {8: 3.0, 16: 5.0, 64: 4.0}

    def speed(workload: Workload, out: Path) -> float:
        out.mkdir(parents=True)
        (out / "trl.log").write_text("Traceback\nRuntimeError: out of room\n")
        if workload.dials.rows not in speeds:
            raise RoleFailed("trl ended with exit code 1.")
        return speeds[workload.dials.rows] * workload.steps

    monkeypatch.setattr(search, "speed", speed)
    console = Console(record=True, width=200)
    every = [TrlDials(rows=rows, threads=2) for rows in (8, 16, 32, 64)]
    found = Search(WORKLOADS["tail"], tmp_path, console).fastest_first(every, steps=3)
    assert [dials.rows for dials in found] == [16, 64, 8]
    shown = console.export_text()
    assert "15 samples/s in 3 steps" in shown and "does not run" in shown and "out of room" in shown
    with pytest.raises(RoleFailed, match="none of the settings"):
        Search(WORKLOADS["tail"], tmp_path / "none", console).fastest_first(every[2:3], steps=3)


def test_ranks_are_started_by_torchrun_with_threads_of_their_own() -> None:
    one, two = TrlDials(rows=8, threads=2), TrlDials(rows=8, threads=1, processes=2)
    assert "torch.distributed.run" not in trl_argv(one, Path("spec.json"))
    started = "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.trl.trl_side spec.json"
    assert trl_argv(two, Path("spec.json"))[1:] == started.split()
    assert (trl_environment(one)["OMP_NUM_THREADS"], trl_environment(two)["OMP_NUM_THREADS"]) == ("2", "1")
