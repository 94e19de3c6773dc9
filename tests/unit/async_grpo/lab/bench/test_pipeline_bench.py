"""The bench of the whole loop: its work, its balance, and what it makes of the files of its runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from async_grpo.app.launch.role_process import available_cores
from async_grpo.data.jsonl import JsonlSource
from async_grpo.errors import ConfigError, DataError, EngineError, RoleFailed
from async_grpo.lab.bench.measure import Machine
from async_grpo.lab.bench.pipeline.bench import (
    PROBED_PROMPTS,
    _open_folder,
    check_options,
    make_probing_work,
    read_probes,
)
from async_grpo.lab.bench.pipeline.fixed_lengths import lengths_in
from async_grpo.lab.bench.pipeline.observe import (
    Generated,
    LoadedUpdate,
    RunMetrics,
    RunRecord,
    ServerTimeline,
    check_work,
    measure_run,
    read_record,
)
from async_grpo.lab.bench.pipeline.results import (
    MAX_PROMPT,
    MIN_PROMPT,
    PipelineResults,
    PromptProbe,
    Sides,
    balance_prompt,
    make_measurements,
    rotate_order,
    view,
    write_plot,
)
from async_grpo.lab.bench.pipeline.setup import POLICY, CoreSplit, PipelineSetup, measure_core_interference, split_cores
from async_grpo.lab.bench.pipeline.workload import (
    CONSTANT,
    HEAVY_TAILED,
    FixedWork,
    Kind,
    StepPlan,
    draw_lengths,
    read_lengths,
)
from async_grpo.lab.bench.rollout.workload import number_words
from async_grpo.telemetry.jsonl import JsonLines
from async_grpo.telemetry.timeline import Timeline

WORK = FixedWork(groups_per_step=2, group_size=2, lengths=tuple(range(1, 17)), prompt_tokens=(4,) * 4)
MACHINE = Machine(cpu="a processor", cores=2, python="3.11.7", date="2026-01-01 00:00:00+0000", load=0.5)
GEN_S, UPDATE_S, TRAIN_S = 3.0, 0.5, 1.0
STEP_S = GEN_S + UPDATE_S + TRAIN_S
SYNC = StepPlan(0, WORK.steps)


def sync_record() -> RunRecord:
    """A loop in which nothing overlaps: GEN_S of generation after UPDATE_S of new weights, then TRAIN_S of training."""
    rows, groups, updates = [], [], []
    for version in range(SYNC.steps):
        begin_s = version * STEP_S
        updates.append(LoadedUpdate(version, (begin_s, begin_s + UPDATE_S)))
        for seq in range(version * WORK.groups_per_step, (version + 1) * WORK.groups_per_step):
            groups.append(Generated(seq, version, sum(WORK.group_lengths(seq)), (begin_s, begin_s + UPDATE_S + GEN_S)))
        rows.append(row(WORK, version, begin_s + STEP_S, wait_s=UPDATE_S + GEN_S))
    return RunRecord(rows, [ServerTimeline(tuple(groups), tuple(updates))])


def row(work: FixedWork, version: int, time_s: float, *, wait_s: float, age: int = 0) -> dict[str, object]:
    step = {"kind": "step", "step": version + 1, "version": version, "epoch": 1, "time_s": time_s, "wait_s": wait_s}
    tokens = {"trained_tokens": work.tokens_of_step(version), "read_tokens": work.read_in_step(version)}
    return step | tokens | {"age_mean": float(age), "age_max": age}


def observed(tokens_per_s: float, *, step_s: float = 2.0, wait_s: float = 1.0) -> RunMetrics:
    rest = {"generated": 1.0, "rollout_idle": 0.5, "update_s": 0.1, "age_mean": 0.5, "age_max": 2}
    idle = wait_s / step_s
    return RunMetrics(step_s, wait_s, tokens_per_s, samples_per_s=tokens_per_s / 40, trainer_idle=idle, **rest)


def test_the_overlap_bound_is_two_for_equal_sides_and_one_for_an_idle_side() -> None:
    assert Sides(3.0, 3.0).bound == 2.0
    assert Sides(3.0, 1.0).bound == Sides(1.0, 3.0).bound == pytest.approx(4 / 3)
    assert Sides(3.0, 1e-9).bound == pytest.approx(1.0)
    assert Sides(3.0, 1.5).ratio == 2.0


@pytest.mark.parametrize(
    ("short", "long", "wanted"),
    [
        (Sides(2.0, 1.0), Sides(2.0, 3.0), 60),  # halfway
        (Sides(2.0, 1.0), Sides(2.0, 2.0), 110),
        (Sides(2.0, 1.0), Sides(2.0, 1.5), 210),  # beyond the longer probe
        (Sides(1.0, 3.0), Sides(1.0, 4.0), MIN_PROMPT),  # training takes longer whatever the prompt
        (Sides(9.0, 1.0), Sides(9.0, 1.01), MAX_PROMPT),
        (Sides(2.0, 1.0), Sides(4.0, 1.0), 10),  # longer prompts do not help: the probe that is nearer
        (Sides(4.0, 1.0), Sides(7.0, 3.9), 10),
    ],
)
def test_prompts_get_the_length_at_which_both_sides_take_equally_long(short: Sides, long: Sides, wanted: int) -> None:
    assert balance_prompt(PromptProbe(10, short), PromptProbe(110, long)) == wanted


def test_the_calibration_trains_every_length_with_both_prompts() -> None:
    probing, (short, long) = make_probing_work(WORK), PROBED_PROMPTS
    for step in range(WORK.steps):
        assert probing.tokens_of_step(step) == probing.tokens_of_step(step + WORK.steps) == WORK.tokens_of_step(step)
        assert {probing.prompt_tokens[step], probing.prompt_tokens[step + WORK.steps]} == {short, long}
    plan = StepPlan(0, probing.steps)
    rows, now_s = [], 0.0
    for version in range(plan.steps):
        wait_s, rest_s = (5.0, 1.0) if probing.prompt_tokens[version % probing.steps] == short else (6.0, 4.0)
        now_s += wait_s + rest_s
        rows.append(row(probing, version, now_s, wait_s=wait_s))
    found = read_probes(RunRecord(rows, []), probing, plan)
    assert found == [PromptProbe(short, Sides(5.0, 1.0)), PromptProbe(long, Sides(6.0, 4.0))]


def test_lengths_depend_only_on_the_seed_and_have_a_truncated_heavy_tail() -> None:
    lengths = np.array(draw_lengths("lognormal", 4000, seed=1))
    assert draw_lengths("lognormal", 100, seed=1) == tuple(lengths[:100]) != draw_lengths("lognormal", 100, seed=2)
    assert np.median(lengths) == pytest.approx(HEAVY_TAILED.median, rel=0.1)
    assert np.log(lengths[lengths < HEAVY_TAILED.longest]).std() == pytest.approx(HEAVY_TAILED.sigma, rel=0.1)
    assert lengths.max() == HEAVY_TAILED.longest and lengths.min() >= 1
    assert draw_lengths("constant", 3, seed=1) == (CONSTANT,) * 3


def test_recorded_lengths_come_from_a_file_or_from_the_samples_of_a_run(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "lengths.jsonl") as file:
        for length in (5, 9, 0):
            file.write({"length": length})
    assert read_lengths(tmp_path / "lengths.jsonl") == [5, 9]
    with JsonLines(tmp_path / "samples" / "rollout-0.jsonl") as file:
        spans = [[[0, 0, 7], [1, 7, 12]], [[1, 0, 3]], []]
        file.write({"prompt": "p", "completions": [{"text": "t", "spans": one} for one in spans]})
    assert read_lengths(tmp_path / "samples") == [12, 3]
    drawn = draw_lengths("recorded", 200, seed=1, recorded=tmp_path / "samples")
    assert set(drawn) == {12, 3} and drawn == draw_lengths("recorded", 200, seed=1, recorded=tmp_path / "samples")


@pytest.mark.parametrize(
    ("kind", "name", "error", "named"),
    [
        ("recorded", "empty.jsonl", DataError, "empty.jsonl .*'length'"),
        ("recorded", None, ConfigError, "--lengths is recorded.*--lengths-from"),
        ("lognormal", "empty.jsonl", ConfigError, "--lengths is lognormal.*--lengths-from"),
    ],
)
def test_missing_lengths_are_rejected(
    kind: Kind, name: str | None, error: type[Exception], named: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": "no length"}\n')
    with pytest.raises(error, match=named):
        draw_lengths(kind, 1, seed=1, recorded=name and tmp_path / name)


def test_any_period_of_steps_is_the_same_work() -> None:
    for start in (0, 1, 3, 9):
        steps = [WORK.tokens_of_step(version) for version in range(start, start + WORK.steps)]
        assert sorted(steps) == [10, 26, 42, 58] and WORK.tokens == 136


def test_the_timed_part_starts_after_the_head_start_and_ends_before_admission_does() -> None:
    plans = [StepPlan(staleness, timed=12) for staleness in (0, 2, 8)]
    assert [(plan.head, plan.steps) for plan in plans] == [(3, 15), (5, 19), (11, 31)]


def test_a_run_gets_the_work_as_drawn(tmp_path: Path) -> None:
    setup = PipelineSetup(tmp_path, tmp_path / "model", POLICY, CoreSplit((0,), (1,)))
    config = setup.build_config("s2-r1", WORK, StepPlan(2, timed=WORK.steps))
    assert (config.steps, config.max_staleness, config.rollout.max_concurrency) == (11, 2, WORK.samples_per_step)
    assert (config.launch.cores.rollout, config.launch.cores.trainer) == ([0], [1])
    source = JsonlSource(config, number_words(tmp_path, 10))
    assert not source.dropped
    for index in range(3 * source.training_rows):
        task = source.task(index)
        assert lengths_in(task.answer) == list(WORK.group_lengths(index)) and len(task.prompt_ids()) == 4
    (held_out,) = source.held_out()
    assert lengths_in(held_out.answer)[0] <= config.sampling.max_tokens


def test_no_sample_is_preempted_or_longer_than_the_model(tmp_path: Path) -> None:
    setup = PipelineSetup(tmp_path, tmp_path / "model", POLICY, CoreSplit((), ()))
    long = replace(WORK, lengths=(6000,) * 16, groups_per_step=1, group_size=16, prompt_tokens=(100,))
    assert setup.build_config("long", long, StepPlan(0, 1)).rollout.vllm.kv_cache_bytes > 16 * 6100 * 2 * 4 * 2 * 64 * 4
    with pytest.raises(ConfigError, match=r"8208 tokens.*--lengths-from"):
        setup.build_config("longer", replace(long, lengths=(8108,) * 16), StepPlan(0, 1))


def test_a_loop_without_overlap_takes_the_sum_of_its_sides() -> None:
    assert asdict(measure_run(sync_record(), WORK, SYNC)) == pytest.approx(
        {
            "step_s": STEP_S,
            "wait_s": GEN_S + UPDATE_S,
            "tokens_per_s": WORK.tokens / (WORK.steps * STEP_S),
            "samples_per_s": WORK.samples_per_step / STEP_S,
            "generated": 1.0,
            "trainer_idle": (GEN_S + UPDATE_S) / STEP_S,
            "rollout_idle": (UPDATE_S + TRAIN_S) / STEP_S,
            "update_s": UPDATE_S,
            "age_mean": 0.0,
            "age_max": 0,
        }
    )


def test_an_engine_that_waits_for_the_weights_of_its_tickets_is_idle() -> None:
    record = sync_record()
    late = tuple(LoadedUpdate(one.version, (one.span[0] + 1.0, one.span[1] + 1.0)) for one in record.servers[0].updates)
    seen = measure_run(RunRecord(record.steps, [replace(record.servers[0], updates=late)]), WORK, SYNC)
    assert seen.rollout_idle == pytest.approx((1.0 + UPDATE_S + TRAIN_S) / STEP_S)


def test_a_used_up_lead_does_not_count() -> None:
    plan = StepPlan(2, WORK.steps)
    rows = [row(WORK, version, 10.0 + version, wait_s=0.0, age=1) for version in range(plan.steps)]
    spans = [(0.0, 13.0)] * 16 + [(14.0, 18.0)] * 6  # the clock runs from 14 to 18
    groups = tuple(Generated(seq, 0, sum(WORK.group_lengths(seq)), span) for seq, span in enumerate(spans))
    seen = measure_run(RunRecord(rows, [ServerTimeline(groups, ())]), WORK, plan)
    made = sum(group.tokens for group in groups[16:])
    assert seen.generated == pytest.approx(made / WORK.tokens) and seen.generated < 1
    assert seen.tokens_per_s == pytest.approx(made / 4.0)
    assert (seen.age_mean, seen.age_max) == (1.0, 1)
    ahead = tuple(replace(group, span=(14.0, 18.0)) for group in groups)  # generating ahead is no gain either
    seen = measure_run(RunRecord(rows, [ServerTimeline(ahead, ())]), WORK, plan)
    assert seen.generated > 1 and seen.tokens_per_s == pytest.approx(WORK.tokens / 4.0)


def test_a_completion_of_another_length_ends_the_bench() -> None:
    record = sync_record()
    check_work(record, WORK, SYNC, "s0-r1")
    groups = list(record.servers[0].groups)
    groups[3] = replace(groups[3], tokens=14)
    with pytest.raises(EngineError, match=r"s0-r1 generated .*group 3 with 14 .*\b15\b"):
        check_work(RunRecord(record.steps, [ServerTimeline(tuple(groups), ())]), WORK, SYNC, "s0-r1")


@pytest.mark.parametrize(
    ("last", "named"),
    [
        ({"trained_tokens": 0}, "1 of 7 .*step 6 with 0 "),
        ({"read_tokens": 7}, r"s0-r1 read .*step 6 with 7 .*\b54\b"),
        ({"epoch": 2}, "was restarted"),
        (None, "step 6 with none"),
    ],
)
def test_a_step_that_did_other_work_ends_the_bench(last: dict[str, int] | None, named: str) -> None:
    record = sync_record()
    changed = [] if last is None else [{**record.steps[-1], **last}]
    with pytest.raises(EngineError, match=named):
        check_work(RunRecord([*record.steps[:-1], *changed], record.servers), WORK, SYNC, "s0-r1")


def test_the_files_of_a_run_are_read(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(row(WORK, 0, 5.0, wait_s=1.0))
        metrics.write({"kind": "probe", "version": 1})
    server = Timeline(tmp_path / "timeline" / "rollout-0.jsonl", "rollout-0")
    server.span("generation", "group 7", 1.0, 3.0, version=2, tokens=40)
    server.span("weights", "version 3", 2.0, 2.5)
    server.span("wait", "ticket", 3.0, 4.0)
    server.close()
    record = read_record(tmp_path)
    assert [one["step"] for one in record.steps] == [1]
    assert record.servers == [ServerTimeline((Generated(7, 2, 40, (1.0, 3.0)),), (LoadedUpdate(3, (2.0, 2.5)),))]


def test_no_staleness_is_always_first() -> None:
    order = {0: (0, 1, 2), 1: (1, 2, 0), 2: (2, 0, 1)}
    assert rotate_order([0, 1, 2], 3) == [(repetition, one) for repetition, turn in order.items() for one in turn]


def test_ratios_are_taken_within_a_repetition() -> None:
    """The second repetition had half of the machine: values halve, ratios stay."""
    slow = observed(50.0, step_s=4.0, wait_s=2.0)
    found = PipelineResults({0: [observed(100.0), slow], 2: [observed(180.0), observed(90.0)]})
    assert asdict(found.speedup(2)) == pytest.approx({"median": 1.8, "lowest": 1.8, "highest": 1.8})
    assert found.share_of_bound(2).median == pytest.approx(0.9)
    assert found.spread(2, lambda one: one.tokens_per_s).median == 135.0
    assert [one.bound for one in found.sides] == [2.0, 2.0]


def results() -> PipelineResults:
    speeds = {0: 100.0, 2: 170.0, 8: 184.0}
    return PipelineResults(
        {one: [observed(speed * noise) for noise in (0.9, 1.0, 1.05)] for one, speed in speeds.items()}
    )


def test_the_table_has_a_row_per_staleness() -> None:
    figures = make_measurements(results())
    by_name = {figure.name: figure for figure in figures}
    assert len(by_name) == len(figures)
    speed = by_name["S=2: tokens/s"]
    assert (speed.value, speed.baseline, speed.ratio) == (170.0, 100.0, pytest.approx(1.7))
    assert by_name["S=2: share of the overlap bound"].value == pytest.approx(0.85)
    assert (by_name["overlap bound, S=0"].value, by_name["T_gen, S=0"].value) == (2.0, 1.0)
    assert by_name["S=0: tokens/s"].baseline is None and "S=0: share of the overlap bound" not in by_name
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view("bench", figures, MACHINE))
    lines = capture.get().splitlines()
    (shown,) = [line for line in lines if "S=2" in line]
    for part in ("170 (153 to 178)", "1.70", "0.85", "50%", "0.5"):
        assert part in shown
    assert any("overlap bound, S=0" in line and "2 x" in line for line in lines)
    assert json.dumps([asdict(figure) for figure in figures], allow_nan=False)


def test_the_plot_is_a_png_file(tmp_path: Path) -> None:
    write_plot(tmp_path / "pipeline.png", results(), "made up")
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")


def test_options_have_defaults() -> None:
    chosen, quick = check_options(quick=False), check_options(quick=True, staleness="4, 0")
    assert (chosen.staleness, chosen.repetitions, chosen.steps, chosen.cores) == ((0, 1, 2, 4, 8), 3, 12, 1)
    assert (quick.staleness, quick.repetitions, quick.steps) == ((4, 0), 1, 2)


@pytest.mark.parametrize("staleness", ["1,2", "0,0,1", "0,x", "0,-1", "0,1.5"])
def test_a_wrong_list_of_staleness_is_rejected(staleness: str) -> None:
    with pytest.raises(ConfigError, match="--staleness"):
        check_options(quick=False, staleness=staleness)


@pytest.mark.parametrize(
    ("here", "each", "rollout", "trainer"),
    [
        ([], 1, (), ()),
        ([0, 1, 2, 3], 1, (0,), (2,)),
        ([4, 5, 6, 7], 2, (4, 5), (6, 7)),
        (range(8), 2, (0, 2), (4, 6)),
        (range(6), 3, (0, 1, 2), (3, 4, 5)),  # 2 and 3 are one core
        ([0, 2, 4, 5, 6, 7], 3, (0, 2, 4), (5, 6, 7)),
        ([4, 5], 1, (4,), (5,)),
        ([2, 3, 5], 1, (2,), (5,)),  # 4, the first thread of 5, is not ours
    ],
)
def test_sides_share_no_core_unless_they_must(
    here: list[int], each: int, rollout: tuple[int, ...], trainer: tuple[int, ...]
) -> None:
    assert split_cores(here, each, sibling_of=lambda core: core // 2 * 2) == CoreSplit(rollout, trainer)
    with pytest.raises(ConfigError, match=r"--cores is 2 .* 4 in total.* 3:"):
        split_cores([0, 1, 2], 2)


def test_runs_are_kept_on_request_and_after_a_failure(tmp_path: Path) -> None:
    said: list[str] = []
    with _open_folder(tmp_path / "out", said.append) as asked_for:
        (asked_for / "runs").mkdir()
    assert (tmp_path / "out" / "runs").is_dir()
    with pytest.raises(ConfigError, match=rf"--out: {tmp_path}/out "), _open_folder(tmp_path / "out", said.append):
        pass
    with _open_folder(None, said.append) as whole:
        (whole / "runs").mkdir()
    assert not whole.exists() and not said
    with pytest.raises(RoleFailed), _open_folder(None, said.append) as failed:
        raise RoleFailed(f"see {failed}/runs/s0-r1/logs/trainer.log")
    assert failed.is_dir() and str(failed) in said[0]
    failed.rmdir()
    with pytest.raises(SystemExit), _open_folder(None, said.append) as interrupted:
        raise SystemExit(130)
    assert not interrupted.exists() and len(said) == 1


def test_the_interference_of_two_cores_is_measured() -> None:
    here = available_cores()
    assert measure_core_interference(CoreSplit((), ())) is None
    if here:
        speed = measure_core_interference(CoreSplit((here[0],), (here[-1],)))
        assert speed is not None and math.isfinite(speed) and speed > 0
        assert available_cores() == here
