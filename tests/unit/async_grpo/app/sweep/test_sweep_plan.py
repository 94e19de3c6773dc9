"""Which runs a sweep has, and which it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from async_grpo.app.sweep.folder import PointRecord, SweepFolder, SweepRecord
from async_grpo.app.sweep.plan import Point, SweepPlan, SweepRequest, lay_out, parse_axes, point_name
from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError

BASE = "name: q\nsteps: 4\nmodel: {random: {}}\n"


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., SweepPlan]:
    """Lays out a sweep of BASE, or of another text."""

    def laid_out(
        grid: Sequence[str],
        *,
        seeds: Sequence[int] = (1,),
        known: Sequence[Point] = (),
        text: str = BASE,
        overrides: Sequence[str] = (),
    ) -> SweepPlan:
        file = tmp_path / "q.yaml"
        file.write_text(text)
        ask = SweepRequest("q", overrides, parse_axes(grid, overrides), seeds, tmp_path / "a sweep: mine" / "runs")
        return lay_out(ask, known, lambda given: load(file, given))

    return laid_out


def names(plan: SweepPlan) -> list[str]:
    return [point.name for point in plan.points]


def test_every_combination_with_every_seed_is_a_run_of_its_own(plan: Callable[..., SweepPlan]) -> None:
    made = plan(["max_staleness=0,2", "trainer.objective.preset=grpo,areal"], seeds=(1, 2))
    assert len(made.points) == 8 and made.asked == set(names(made))
    assert len({point.config.run_dir for point in made.points}) == 8
    configs = [(p.config.max_staleness, p.config.trainer.objective.preset, p.seed) for p in made.points]
    assert set(configs) == {(s, preset, seed) for s in (0, 2) for preset in ("grpo", "areal") for seed in (1, 2)}


def test_a_preset_of_the_grid_sets_what_follows_from_it(plan: Callable[..., SweepPlan]) -> None:
    made = plan(["trainer.objective.preset=grpo,areal"])
    assert [point.config.trainer.objective.loss for point in made.points] == ["ppo_clip", "decoupled"]


def test_runs_write_below_the_folder_of_the_sweep_whatever_it_is_called(plan: Callable[..., SweepPlan]) -> None:
    [point] = plan(["max_staleness=1"]).points
    assert point.config.run_dir.parent.parent.name == "a sweep: mine"


def test_a_name_says_the_point() -> None:
    assert point_name("q", {"max_staleness": "4", "trainer.objective.preset": "grpo"}, 2) == (
        "q-max_staleness.4-seed.2-preset.grpo"
    )


def test_long_names_are_cut_and_stay_apart() -> None:
    values = [
        {"trainer.optimizer.a_rather_long_key_indeed": "1e-4", "rollout.another_long_key": str(n)} for n in (1, 2)
    ]
    made = [point_name("quite-a-long-base-name", value, 1) for value in values]
    assert made[0] != made[1]
    for name in made:
        assert len(name) <= 64 and RunConfig.model_validate({"name": name, "model": {"random": {}}}).name == name


def test_keys_that_a_name_leaves_out_get_names_that_differ(plan: Callable[..., SweepPlan]) -> None:
    made = plan(["launch.stop_timeout_s=10,20"])
    assert len(set(names(made))) == 2


def test_a_combination_that_is_not_allowed_is_named_with_the_reason_and_nothing_else_is_laid_out(
    plan: Callable[..., SweepPlan],
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(["max_staleness=0,1", "buffer.selector.kind=fifo,freshest", "buffer.on_stale=wait,drop"], seeds=(1, 2))
    text = str(refused.value)
    assert "2 of the 8 combinations" in text
    for staleness in (0, 1):
        assert f"max_staleness={staleness}, buffer.selector.kind=freshest, buffer.on_stale=wait: " in text
    assert "=fifo" not in text and "wait" in text


def test_two_texts_of_one_value_are_refused_as_one_run(plan: Callable[..., SweepPlan]) -> None:
    with pytest.raises(ConfigError, match="are the same run"):
        plan(["trainer.optimizer.lr=1.0e-3,0.001"])


def test_more_values_and_seeds_are_added_to_what_is_there(plan: Callable[..., SweepPlan]) -> None:
    before = plan(["max_staleness=0,2"])
    after = plan(["max_staleness=2,4"], seeds=(1, 2), known=before.points)
    assert len(after.points) == 5
    assert after.asked == set(names(after)) - {"q-max_staleness.0-seed.1"}


def test_another_axis_takes_up_the_points_that_have_its_value_already(plan: Callable[..., SweepPlan]) -> None:
    before = plan(["max_staleness=0,2"])
    after = plan(["max_staleness=0,2", "trainer.objective.preset=areal,grpo"], known=before.points)
    assert len(after.points) == 4
    assert set(names(before)) < set(names(after))


def test_a_changed_base_is_refused_by_the_key_even_if_only_new_points_are_asked_for(
    plan: Callable[..., SweepPlan],
) -> None:
    before = plan(["max_staleness=0"])
    for changed in ({"text": BASE.replace("steps: 4", "steps: 8")}, {"overrides": ["steps=8"]}):
        with pytest.raises(ConfigError, match=r"another base configuration: steps would differ .*max_staleness=0"):
            plan(["max_staleness=2"], known=before.points, **changed)


def test_where_and_how_patiently_runs_work_may_change(plan: Callable[..., SweepPlan]) -> None:
    before = plan(["max_staleness=0,2"])
    after = plan(["max_staleness=0,2"], known=before.points, overrides=["launch.stop_timeout_s=77"])
    assert names(after) == names(before)
    assert after.points[0].config.launch.stop_timeout_s == 77


def test_the_folder_gives_back_the_points_that_were_written_even_after_it_was_moved(
    plan: Callable[..., SweepPlan], tmp_path: Path
) -> None:
    points = plan(["max_staleness=0,2"]).points
    folder = SweepFolder(tmp_path / "first")
    folder.write_configs(points)
    folder.write(SweepRecord(points=[PointRecord(name=point.name, values=dict(point.values)) for point in points]))
    moved = SweepFolder(folder.path.rename(tmp_path / "second"))
    read = moved.points(moved.read())
    assert [(point.name, point.values) for point in read] == [(point.name, point.values) for point in points]
    assert {point.config.runs_dir for point in read} == {tmp_path / "second" / "runs"}


def test_a_file_that_is_not_the_record_of_a_sweep_is_refused(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    for text, words in (("[1, 2", "not the record"), ('{"format": 9}', "format 9")):
        folder.record_file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            folder.read()


def test_two_sweeps_never_work_in_one_folder(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "s")
    with folder.locked(), pytest.raises(ConfigError, match="another `async-grpo sweep`"), folder.locked():
        pass
    with folder.locked():
        pass
