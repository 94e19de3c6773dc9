"""From the folders of fake runs to metrics, report.md, sweep.json and plots."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.app.report.summary import summarize
from async_grpo.lab.sweep import plots
from async_grpo.lab.sweep.folder import PointRecord, SweepFolder, SweepRecord
from async_grpo.lab.sweep.plan import Point, SweepPlan
from async_grpo.lab.sweep.plots import pareto_front
from async_grpo.lab.sweep.report import SweepComparison, compare_settings, read_point_metrics, render_report
from async_grpo.lab.sweep.results import (
    FAILED,
    FINISHED,
    NEW,
    UNFINISHED,
    read_metrics,
    row_metrics,
)
from async_grpo.lab.sweep.settings import group_by_setting
from async_grpo.lab.sweep.sweep import describe_plan
from async_grpo.telemetry.jsonl import read_rows
from tests.support.sweep_fakes import STEPS, figures, leave_run, point

PLOTS = ("tradeoff", "reward_by_step", "reward_by_time", "figures")


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return leave_sweep(tmp_path / "my-sweep")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """A sweep with its report, written by the command."""
    made = leave_sweep(tmp_path_factory.mktemp("sweep") / "my-sweep")
    result = CliRunner().invoke(app, ["sweep", "--report", str(made.path)])
    assert result.exit_code == 0, result.output
    assert "recommended: max_staleness=2" in result.output
    assert "caveat: Too short" in result.output
    return made


def leave_sweep(path: Path) -> SweepFolder:
    """S = 2 learns as well as S = 0 and is twice as fast; S = 8 is faster still and learns less."""
    made = SweepFolder(path)
    points = [
        point(made.runs_dir, f"s{staleness}-{seed}", seed=seed, max_staleness=staleness)
        for staleness in (0, 2, 8)
        for seed in (1, 2)
    ]
    for one in points:
        staleness, seed = one.config.max_staleness, one.seed
        accuracy = {0: 0.9, 2: 0.89, 8: 0.6}[staleness] + (0.01 if seed == 2 else -0.01)
        leave_run(one, accuracy=accuracy, step_s={0: 4.0, 2: 2.0, 8: 1.0}[staleness])
    made.write_configs(points)
    records = [PointRecord(name=one.name, values=dict(one.values)) for one in points]
    made.write_record(
        SweepRecord(command="async-grpo sweep q.yaml --grid max_staleness=0,2,8 --seeds 1,2", points=records)
    )
    return made


def test_metrics_of_a_run_come_from_its_files(tmp_path: Path) -> None:
    made = point(tmp_path, max_staleness=2, group_size=8)
    leave_run(made, accuracy=0.9, step_s=2.0)
    found = read_metrics(made, {"max_staleness": "2"})
    assert (found.state, found.steps_done, found.accuracy_after, found.eval_prompts) == (FINISHED, STEPS, 0.9, 256)
    assert found.accuracy_mean == pytest.approx((0.4 + 0.9) / 4 + 0.9 / 2)  # the first half rises from 0.4
    assert (found.steps_s, found.wall_s) == (40.0, 70.0)
    assert (found.samples_per_s, found.tokens_per_s) == (16 * 8 / 2.0, 500.0)
    assert (found.trainer_idle, found.rollout_idle) == (0.25, pytest.approx(0.5))
    assert (found.ess, found.clip_fraction) == (pytest.approx(0.9), pytest.approx(0.01))
    assert found.curve.seconds[-1] == 40.0 and found.curve.reward[-1] == 0.9


def test_the_head_start_does_not_count_towards_throughput() -> None:
    rows = [
        {"step": n, "step_s": 0.1 if n <= 3 else 2.0, "wait_s": 0.0 if n <= 3 else 1.0, "groups": 4}
        for n in range(1, 11)
    ]
    found = row_metrics(rows, group_size=8, max_staleness=2)
    assert (found["samples_per_s"], found["trainer_idle"]) == (16.0, 0.5)
    assert found["steps_s"] == pytest.approx(14.3)


def test_throughput_and_idle_shares_equal_those_of_the_run_report(tmp_path: Path) -> None:
    made = point(tmp_path, max_staleness=2)
    leave_run(made, accuracy=0.9, step_s=2.0)
    rows, servers = (read_rows(made.config.run_dir / name) for name in ("metrics.jsonl", "timeline/rollout-0.jsonl"))
    own, found = summarize(made.config, rows, [], [], {}, {}, 1.0, servers=[servers]), read_metrics(made, {})
    for key in ("tokens_per_s", "trainer_idle", "rollout_idle"):
        assert own[key] == getattr(found, key) is not None


def test_missing_files_are_no_error_and_a_finished_run_has_none(tmp_path: Path) -> None:
    assert read_metrics(point(tmp_path, "new"), {}).state == NEW
    assert read_metrics(point(tmp_path, "new"), {}, error="boom").state == FAILED
    half = point(tmp_path, "half")
    leave_run(half, accuracy=0.9, step_s=2.0, steps=5, finished=False)
    found = read_metrics(half, {})
    assert (found.state, found.steps_done, found.accuracy_after) == (UNFINISHED, 5, None)
    leave_run(half, accuracy=0.9, step_s=2.0)
    assert read_metrics(half, {}, error="boom").error == ""


def compared(folder: SweepFolder, tolerance: float | None = None) -> tuple[SweepComparison, str]:
    """The comparison and the text of a report, without its pictures."""
    record = folder.read_record()
    found = read_point_metrics(folder, record)
    settings = group_by_setting(found)
    comparison = compare_settings(record, found, settings, tolerance)
    return comparison, render_report(folder.path.name, comparison, settings, [])


def test_the_report_recommends_the_fast_setting_that_learned_as_well(written: SweepFolder) -> None:
    text = (written.path / "report.md").read_text()
    assert "**Recommended: max_staleness=2.**" in text
    assert "| **max_staleness=2** | 2 of 2 |" in text and "| max_staleness=8 | 2 of 2 |" in text
    assert "[s0-1](runs/s0-1/report.md)" in text
    assert "async-grpo sweep q.yaml --grid max_staleness=0,2,8 --seeds 1,2" in text
    for name in PLOTS:
        assert f"plots/{name}.png" in text
        picture = (written.path / "plots" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_sweep_json_has_every_metric_of_every_point(written: SweepFolder) -> None:
    facts = json.loads((written.path / "sweep.json").read_text())
    assert facts["axes"] == ["max_staleness"] and facts["choice"]["label"] == "max_staleness=2"
    assert len(facts["points"]) == 6
    for one in facts["points"]:
        missing = {key for key, value in one.items() if value is None}
        unmeasured = {"greedy_accuracy_before", "greedy_accuracy_after", "generated_tokens", "trained_tokens"}
        assert missing == unmeasured | {"eval_error", "kl"}
        assert len(one["curve"]["reward"]) == STEPS


def test_two_axes_give_a_table_per_metric_with_a_column_per_value_of_the_first(tmp_path: Path) -> None:
    made = SweepFolder(tmp_path / "two-axes")
    found = []
    for staleness, lr, seed in itertools.product((0, 2), ("1e-05", "0.1"), (1, 2)):
        one = point(made.runs_dir, f"s{staleness}-{lr}-{seed}", seed=seed, max_staleness=staleness)
        leave_run(one, accuracy=0.9 - 0.1 * staleness + 0.02 * seed, step_s=1.0, finished=one.name != "s2-0.1-2")
        found.append(read_metrics(one, {"max_staleness": str(staleness), "trainer.optimizer.lr": lr}))
    settings = group_by_setting(found)
    comparison = compare_settings(SweepRecord(command="c", points=[]), [], settings, None)
    text = render_report("p", comparison, settings, [])
    assert "| held-out, after | max_staleness=0 | max_staleness=2 |" in text
    assert "| lr=1e-05 | 0.930 ± 0.010 | 0.730 ± 0.010 |" in text
    assert "| lr=0.1 | 0.930 ± 0.010 | 0.720 (1 of 2 seeds) |" in text


def test_a_section_as_a_value_is_shown_as_typed(tmp_path: Path) -> None:
    made, typed = SweepFolder(tmp_path / "sections"), "{preset: dapo, corrections: [opsm]}"
    one = point(made.runs_dir, trainer={"objective": {"preset": "dapo", "corrections": ["opsm"]}})
    one = Point({"trainer.objective": typed}, one.config)
    made.write_configs([one])
    record = SweepRecord(command="c", points=[PointRecord(name=one.name, values=dict(one.values))])
    assert [found.values for found in read_point_metrics(made, record)] == [{"trainer.objective": typed}]
    console = Console(width=400)
    with console.capture() as printed:
        console.print(describe_plan(made, SweepPlan([one], frozenset([one.name]))))
    assert f"trainer.objective={typed}, seed=1" in printed.get()


def test_a_failed_point_is_shown_with_its_error_and_excludes_its_setting(folder: SweepFolder) -> None:
    record = folder.read_record()
    why = "trainer ended | with exit code 1"
    broken = [msgspec.structs.replace(one, error=why if one.name == "s2-1" else "") for one in record.points]
    (folder.runs_dir / "s2-1" / "run.json").unlink()
    folder.write_record(SweepRecord(command=record.command, points=broken))
    comparison, text = compared(folder)
    assert comparison.choice.label == "max_staleness=0"
    [excluded] = [row for row in text.splitlines() if "seed 1: failed" in row]
    assert "max_staleness=2" in excluded
    assert why in text


def test_caveats_mention_shared_machines_and_short_runs(folder: SweepFolder) -> None:
    folder.write_record(
        SweepRecord(points=[msgspec.structs.replace(one, at_once=3) for one in folder.read_record().points])
    )
    text = compared(folder)[1]
    assert "3 runs shared" in text
    [warning] = [row for row in text.splitlines() if "Too short" in row]
    assert "s8-1, s8-2" in warning and "s2-1" not in warning and "steps=36" in warning


def test_points_of_different_grids_are_compared_by_their_resolved_configurations(folder: SweepFolder) -> None:
    added = point(folder.runs_dir, "s2-grpo", max_staleness=2, trainer={"objective": {"preset": "grpo"}})
    leave_run(added, accuracy=0.95, step_s=0.5)
    folder.write_configs([added])
    record = PointRecord(name=added.name, values={"max_staleness": "2", "trainer.objective.preset": "grpo"})
    folder.write_record(SweepRecord(points=[*folder.read_record().points, record]))
    comparison, _ = compared(folder)
    assert {tuple(one.values.values()) for one in comparison.points} == {
        ("0", "areal"), ("2", "areal"), ("8", "areal"), ("2", "grpo"),
    }  # fmt: skip
    assert comparison.choice.label == "max_staleness=2, preset=grpo"


def test_a_stated_tolerance_does_not_recommend_a_run_that_is_too_short(folder: SweepFolder) -> None:
    choice = compared(folder, tolerance=0.5)[0].choice
    assert "max_staleness=8" in choice.within and choice.label == ""


def test_a_dry_run_lists_the_points_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "q.yaml"
    file.write_text("name: q\nmodel: {random: {}}\n")
    arguments = ["sweep", str(file), "--grid", "max_staleness=0,3", "--seeds", "1,2", "--dry-run"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "runs/q-sweep" in result.output
    assert result.output.count("is run") == 4
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "/nowhere"], "has no sweep"),
        (["--grid", "max_staleness=0,-1"], "max_staleness=-1"),
        (["--grid", "max_staleness=0,2", "-o", "no_such=1"], "no_such"),
        (["--report", ".", "--grid", "a=1"], "starts no runs"),
        ([], "--grid key=value"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_started(tmp_path: Path, arguments: list[str], words: str) -> None:
    file = tmp_path / "q.yaml"
    file.write_text("name: q\nmodel: {random: {}}\n")
    config = [] if "/nowhere" in arguments else [str(file)]
    result = CliRunner().invoke(app, ["sweep", *config, "--out", str(tmp_path / "s"), *arguments])
    assert result.exit_code == 1
    assert words in result.output
    assert not (tmp_path / "s").exists()


def test_the_legend_has_the_labels_of_all_panels() -> None:
    made = {("grpo", 0): 10.0, ("grpo", 8): 20.0, ("dapo", 2): None}
    settings = group_by_setting(
        [
            figures(staleness, values={"max_staleness": str(staleness), "preset": preset}, samples_per_s=speed)
            for (preset, staleness), speed in made.items()
        ]
    )
    styles = plots.assign_styles(settings)
    rewards, small = plots._draw_rewards(settings, styles, over_seconds=False), plots._draw_metrics(settings, styles)
    assert rewards is not None and small is not None
    assert [text.get_text() for text in rewards.legends[0].get_texts()] == ["0", "2", "8"]
    assert {text.get_text() for text in small.legends[0].get_texts()} == {"preset=grpo", "preset=dapo"}


def test_no_point_beats_the_front_in_both_coordinates() -> None:
    assert pareto_front([(1, 1), (1, 2), (2, 2), (3, 0), (2.5, 0)]) == [(2, 2), (3, 0)]
