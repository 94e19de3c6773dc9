"""Parsing of --grid and --seeds, the points of a sweep, and the ones that it rejects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError
from async_grpo.lab.sweep.folder import PointRecord, SweepFolder, SweepRecord
from async_grpo.lab.sweep.plan import (
    Axis,
    Point,
    SweepPlan,
    SweepRequest,
    combinations,
    parse_axes,
    parse_axis,
    parse_seeds,
    plan_points,
    point_name,
)

PlanPoints = Callable[..., SweepPlan]
BASE = "name: q\nsteps: 4\nmodel: {random: {}}\n"


@pytest.fixture
def plan(tmp_path: Path) -> PlanPoints:
    """Function that plans a sweep of BASE, or of another text."""

    def plan_sweep(
        grid: Sequence[str],
        *,
        seeds: Sequence[int] = (1,),
        known: Sequence[Point] = (),
        text: str = BASE,
        overrides: Sequence[str] = (),
    ) -> SweepPlan:
        file = tmp_path / "q.yaml"
        file.write_text(text)
        request = SweepRequest("q", overrides, parse_axes(grid, overrides), seeds, tmp_path / "a sweep: mine" / "runs")
        return plan_points(request, known, lambda changes: load(file, changes))

    return plan_sweep


def names(plan: SweepPlan) -> list[str]:
    return [point.name for point in plan.points]


def test_an_axis_is_a_key_and_its_values_as_they_were_typed() -> None:
    assert parse_axis("max_staleness=0, 2 ,1e1") == Axis("max_staleness", ("0", "2", "1e1"))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=[a,b],[c]", ("[a,b]", "[c]")),
        ("k={x: 1, y: [2, 3]},null", ("{x: 1, y: [2, 3]}", "null")),
        ('k="a,b",c', ('"a,b"', "c")),
        ("k='[',]", ("'['", "]")),
        ("k=a=b,c", ("a=b", "c")),
    ],
)
def test_a_comma_inside_brackets_or_quotes_belongs_to_its_value(text: str, values: tuple[str, ...]) -> None:
    assert parse_axis(text).values == values


@pytest.mark.parametrize(
    ("grid", "overrides", "why"),
    [
        *[([text], [], "key=value,value") for text in ("s", "=1,2", "s=", "s=0,,2", "s=0,")],
        *[([f"{key}=1,2"], [], fix) for key, fix in (("seed", "--seeds"), ("name", "-o name="), ("runs_dir", "--out"))],
        (["s=2,0,2"], [], "value 2 "),
        (["a=1", "a=2"], [], "--grid a=.*twice"),
        (["a=1"], ["b=1", "a=3"], "^a .*--grid.*-o"),
        ([], [], "--grid key=value"),
    ],
)
def test_a_wrong_grid_is_rejected_with_what_to_type(grid: list[str], overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_axes(grid, overrides)


def test_the_error_for_a_seed_axis_names_the_option_of_simulate() -> None:
    with pytest.raises(ConfigError, match="--seed N"):
        parse_axis("seed=1,2")


def test_the_last_axis_varies_fastest() -> None:
    axes = parse_axes(["s=0,1", "p=x,y"], [])
    assert [tuple(choice.values()) for choice in combinations(axes)] == [("0", "x"), ("0", "y"), ("1", "x"), ("1", "y")]


def test_seeds_are_whole_numbers_and_differ() -> None:
    assert parse_seeds("3, 1") == (3, 1)
    for text in ("", "1,", "a", "-1", "1.5", "1,1"):
        with pytest.raises(ConfigError, match="--seeds"):
            parse_seeds(text)


def test_every_combination_with_every_seed_is_a_separate_run(plan: PlanPoints) -> None:
    made = plan(["max_staleness=0,2", "trainer.objective.preset=grpo,areal"], seeds=(1, 2))
    assert made.requested == set(names(made)) and len({point.config.run_dir for point in made.points}) == 8
    assert {point.config.run_dir.parent.parent.name for point in made.points} == {"a sweep: mine"}
    objectives = [(p.config.max_staleness, p.config.trainer.objective.loss, p.seed) for p in made.points]
    assert set(objectives) == {(s, loss, seed) for s in (0, 2) for loss in ("ppo_clip", "decoupled") for seed in (1, 2)}


def test_names_stay_unique_when_they_are_cut_or_omit_a_key(plan: PlanPoints) -> None:
    assert point_name("q", {"max_staleness": "4", "trainer.objective.preset": "grpo"}, 2) == (
        "q-max_staleness.4-seed.2-preset.grpo"
    )
    values = [{"trainer.optimizer.a_rather_long_key_indeed": "1e-4", "rollout.another_long_key": n} for n in "12"]
    made = [point_name("quite-a-long-base-name", value, 1) for value in values]
    assert made[0] != made[1]
    for name in made:
        assert len(name) <= 64 and RunConfig.model_validate({"name": name, "model": {"random": {}}}).name == name
    assert len(set(names(plan(["launch.stop_timeout_s=10,20"])))) == 2


def test_overrides_of_the_whole_sweep_do_not_crowd_out_the_values_of_a_point() -> None:
    overrides = ["eval.prompts=128", "eval.every_steps=30", "rollout.max_concurrency=64", "steps=60"]
    grid = [{"trainer.objective.preset": preset, "max_staleness": s} for preset in ("grpo", "dapo") for s in "28"]
    made = [point_name("quickstart", values, 1, overrides=overrides) for values in grid]
    assert made[0].startswith("quickstart-max_staleness.2-seed.1-preset.grpo-")
    assert made[0] != point_name("quickstart", grid[0], 1, overrides=overrides[1:])
    assert len(set(made)) == 4


def test_only_combinations_that_are_not_allowed_are_reported(
    plan: PlanPoints,
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(["max_staleness=0,1", "buffer.selector.kind=fifo,freshest", "buffer.on_stale=wait,drop"], seeds=(1, 2))
    text = str(refused.value)
    assert "2 of the 8 combinations" in text and "=fifo" not in text
    for staleness in (0, 1):
        assert f"max_staleness={staleness}, buffer.selector.kind=freshest, buffer.on_stale=wait: " in text


def test_two_spellings_of_one_value_are_rejected_as_the_same_run(plan: PlanPoints) -> None:
    with pytest.raises(ConfigError, match="are the same run"):
        plan(["trainer.optimizer.lr=1.0e-3,0.001"])


def test_new_values_and_seeds_extend_the_existing_points(plan: PlanPoints) -> None:
    before = plan(["max_staleness=0,2"])
    after = plan(["max_staleness=2,4"], seeds=(1, 2), known=before.points)
    assert len(after.points) == 5
    assert after.requested == set(names(after)) - {"q-max_staleness.0-seed.1"}
    wider = plan(["max_staleness=0,2", "trainer.objective.preset=areal,grpo"], known=before.points)
    assert len(wider.points) == 4 and set(names(before)) < set(names(wider))  # areal is what the known points had


def test_a_changed_base_configuration_is_rejected_even_if_only_new_points_are_requested(
    plan: PlanPoints,
) -> None:
    before = plan(["max_staleness=0"])
    for changed in ({"text": BASE.replace("steps: 4", "steps: 8")}, {"overrides": ["steps=8"]}):
        with pytest.raises(ConfigError, match=r": steps .*max_staleness=0"):
            plan(["max_staleness=2"], known=before.points, **changed)
    patient = plan(["max_staleness=0"], known=before.points, overrides=["launch.stop_timeout_s=77"])
    assert names(patient) == names(before) and patient.points[0].config.launch.stop_timeout_s == 77


def test_a_moved_folder_loads_the_points_that_were_written(plan: PlanPoints, tmp_path: Path) -> None:
    points = plan(["max_staleness=0,2"]).points
    folder = SweepFolder(tmp_path / "first")
    folder.write_configs(points)
    records = [PointRecord(name=point.name, values=dict(point.values)) for point in points]
    folder.write_record(SweepRecord(points=records))
    moved = SweepFolder(folder.path.rename(tmp_path / "second"))
    read = moved.load_points(moved.read_record())
    assert [(point.name, point.values) for point in read] == [(point.name, point.values) for point in points]
    assert {point.config.runs_dir for point in read} == {tmp_path / "second" / "runs"}


def test_a_file_that_is_not_a_sweep_record_is_rejected(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    for text, words in (("[1, 2", "not the record"), ('{"format": 9}', "format 9")):
        folder.record_file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            folder.read_record()


def test_two_sweeps_never_run_in_one_folder(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "s")
    with folder.lock(), pytest.raises(ConfigError, match="another `async-grpo sweep`"), folder.lock():
        pass
    with folder.lock():
        pass
