"""What the page is told of runs: figures, curves, differences, logs, reports and sweeps; also of files cut short."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from async_grpo.lab.view import followed, run_pages, server
from async_grpo.lab.view.catalog import RunsRoot
from async_grpo.lab.view.server import make_app, stream_list_events
from async_grpo.telemetry.jsonl import JsonLines
from tests.support.view_runs import HOSTILE, STARTED_S, write_metrics

OUTSIDE = "nobody outside the folder may read this"


class Page:
    """The application over a folder, kept as a server keeps it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._app = make_app(RunsRoot(root), asyncio.Event())

    async def ask(self, path: str, status: int = 200) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=5) as client:
            answer = await client.get(path)
        assert answer.status_code == status, answer.text
        return answer

    async def json(self, path: str) -> Any:
        return (await self.ask(path)).json()


@pytest.fixture
def page(tmp_path: Path) -> Page:
    root = tmp_path / "runs"
    for name, window in (("one", 2), ("folder/two", 4)):
        run = root / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"name: {run.name}\nsteps: 10\nmax_staleness: {window}\n")
        write_metrics(run, range(1, 11))
    (tmp_path / "secret.md").write_text(OUTSIDE)
    return Page(root)


async def test_the_list_has_runs_in_subfolders_with_their_metrics(page: Page) -> None:
    found = {run["id"]: run for run in await page.json("/api/runs")}
    assert sorted(found) == ["folder~two", "one"]
    two = found["folder~two"]
    assert (two["name"], two["status"], two["step"], two["max_staleness"]) == ("folder/two", "interrupted", 10, 4)
    assert (two["reward"], two["age_max"], two["duration_s"]) == (1.0, 2.0, 9.0)


async def test_a_folder_without_a_configuration_is_not_a_run(page: Page) -> None:
    write_metrics(page.root / "bare", range(1, 3))
    assert "bare" not in {run["id"] for run in await page.json("/api/runs")}
    await page.ask("/api/runs/bare", 404)


async def test_a_partial_row_is_read_once_complete_and_a_repeated_step_counts_once(page: Page) -> None:
    path = page.root / "one" / "metrics.jsonl"
    assert (await page.json("/api/runs/one"))["step"] == 10
    line = json.dumps({"kind": "step", "step": 11, "time_s": STARTED_S + 11, "reward_mean": 0.25}) + "\n"
    with path.open("a") as file:
        file.write(line[:20])
    assert (await page.json("/api/runs/one"))["step"] == 10
    with path.open("a") as file:
        file.write(line[20:])
    assert (await page.json("/api/runs/one"))["reward"] == 0.25
    write_metrics(page.root / "one", range(11, 12))
    [curves] = await page.json("/api/curves?run=one&key=reward_mean&key=age_max")
    assert curves["curves"]["reward_mean"][0] == list(range(1, 12))
    assert curves["curves"]["reward_mean"][1][-1] == 1.1


async def test_the_list_does_not_wait_for_long_runs(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "SLICE_BYTES", 1000)
    monkeypatch.setattr(run_pages, "READ_S", 0)
    found = await page.json("/api/runs")
    assert [0 < run["read"] < 1 for run in found] == [True, True] and all(run["step"] < 10 for run in found)
    while any(run["read"] < 1 for run in found):
        found = await page.json("/api/runs")
    assert [run["step"] for run in found] == [10, 10]


async def test_a_restarted_run_is_read_from_its_start(page: Page) -> None:
    assert (await page.json("/api/runs/one"))["step"] == 10
    (page.root / "one" / "metrics.jsonl").unlink()
    write_metrics(page.root / "one", range(1, 3))
    assert (await page.json("/api/runs/one"))["step"] == 2


async def test_curves_over_time_have_evaluations_where_their_version_was_trained(page: Page) -> None:
    with JsonLines(page.root / "one" / "evaluations" / "eval.jsonl") as file:
        for version in (0, 5):
            file.write({"version": version, "sampled_accuracy": version / 10, "greedy_accuracy": None})
    query = "run=one&run=folder~two&key=reward_mean&key=idle.trainer&key=nothing&x=time"
    one, two = await page.json(f"/api/curves?{query}")
    assert sorted(two["curves"]) == ["idle.trainer", "reward_mean"]
    assert one["curves"]["idle.trainer"] == [[float(s) for s in range(10)], [0.2] * 10]
    assert [(row["x"], row["sampled_accuracy"]) for row in one["evaluations"]] == [(0.0, 0.0), (4.0, 0.5)]
    await page.ask("/api/curves?run=one&key=reward_mean&x=moon", 422)


async def test_ages_by_step_and_the_configured_capacity(page: Page) -> None:
    text = "name: one\nmodel: {random: {}}\nmax_staleness: 2\ngroups_per_step: 4\n"
    (page.root / "one" / "config.yaml").write_text(text)
    found = await page.json("/api/runs/one/staleness")
    assert found["ages"] == {"x": list(range(1, 11)), "ages": [0, 1], "share": [[0.5] * 10, [0.5] * 10]}
    assert found["capacity"] == 12  # (S + 1) * P


async def test_staleness_charts_have_curves_or_limits(page: Page) -> None:
    (page.root / "one" / "config.yaml").write_text(
        "name: one\nmodel: {random: {}}\nmax_staleness: 2\ngroups_per_step: 4\n"
    )
    ages, idle, buffer, released = (await page.json("/api/metrics"))["staleness"]
    keys = [series["key"] for chart in (ages, idle, buffer) for series in chart["series"]]
    [run] = await page.json("/api/curves?run=one&key=released_groups.&" + "&".join(f"key={key}" for key in keys))
    assert set(keys) - set(run["curves"]) == {"idle.rollout", "staleness", "age_bound", "capacity_groups"}
    assert run["age_bound"] == 2
    assert released["family"] == "released_groups" and not released["series"]
    assert ages["series"][1]["style"] == {"color": "red", "dash": ":"}


async def test_buffered_and_released_groups_are_curves_of_the_step_rows(page: Page) -> None:
    [run] = await page.json("/api/curves?run=one&key=buffer_groups.&key=released_groups.")
    steps = list(range(1, 11))
    assert run["curves"] == {
        "buffer_groups.inflight": [steps, [3.0] * 10],
        "buffer_groups.ready": [steps, [5.0] * 10],
        "released_groups.trained": [steps, [4.0 * step for step in steps]],
        "released_groups.stale": [steps, [float(step // 2) for step in steps]],
        "released_groups.failed": [steps, [0.0] * 10],
    }


async def test_settings_of_runs_are_compared(page: Page) -> None:
    assert await page.json("/api/differences?run=one&run=folder~two") == [{"key": "max_staleness", "values": [2, 4]}]


async def test_a_log_is_shown_but_no_file_outside_the_folder(page: Page) -> None:
    logs = page.root / "one" / "logs"
    logs.mkdir()
    (logs / "trainer.log").write_text("x" * 70_000 + "the end\n")
    (logs / "evil.log").symlink_to(page.root.parent / "secret.md")
    (page.root / "one" / "report.md").symlink_to(page.root.parent / "secret.md")
    text = (await page.json("/api/runs/one/logs/trainer"))["text"]
    assert len(text) == 64 << 10 and text.endswith("the end\n")
    for path in ("/api/runs/one/logs/evil", "/api/runs/one/logs/..%2f..%2fsecret", "/reports/runs/one/report"):
        assert OUTSIDE not in (await page.ask(path, 404)).text
    for plot in ("..%2fconfig.yaml", "..%2f..%2fx.png", "config.yaml", "none.png"):
        await page.ask(f"/reports/runs/one/plots/{plot}", 404)


async def test_a_log_is_searched_as_a_whole_and_can_be_downloaded(page: Page) -> None:
    logs = page.root / "one" / "logs"
    logs.mkdir()
    lines = ["2026-11-23 12:04:31.207 error   trainer    first failure", "Traceback of it", "x" * 70_000]
    lines += ["2026-11-23 12:04:32.207 info    trainer    fine", '{"level": "warning", "event": "second"}']
    (logs / "trainer.log").write_text("\n".join(lines) + "\n")
    path = "/api/runs/one/logs/trainer"
    assert (await page.json(path))["cut"] is True
    assert (await page.json(f"{path}?q=FIRST"))["text"] == lines[0] + "\n"
    errors = (await page.json(f"{path}?level=error"))["text"].splitlines()
    assert errors == lines[:3], "lines without a level belong to the line before them"
    assert (await page.json(f"{path}?level=warning"))["text"].splitlines()[-1] == lines[4]
    whole = await page.ask(f"{path}/file")
    assert whole.text == (logs / "trainer.log").read_text()
    assert "attachment" in whole.headers["content-disposition"]


async def test_markup_in_a_report_is_escaped(page: Page) -> None:
    fold = f"<details><summary>more {HOSTILE[:8]}</summary>\n\n```\n</details>\n```\n\n</details>"
    text = f"# Title\n\n{HOSTILE}\n\n{fold}\n\n[link](javascript:alert(1))\n\n| a |\n|--:|\n| 1 |\n"
    (page.root / "one" / "report.md").write_text(text)
    html = (await page.ask("/reports/runs/one/report?theme=dark")).text
    assert 'data-theme="dark"' in html and "<h1>Title</h1>" in html and '<td class="number">1</td>' in html
    assert "<details><summary>more &lt;script&gt;</summary>\n<pre><code>&lt;/details&gt;" in html
    assert "<script" not in html and "<img" not in html and "style=" not in html and 'href="javascript' not in html
    await page.ask("/reports/runs/one/report?theme=%22onload", 422)


async def test_sweeps_are_listed_with_their_runs_and_reports(page: Page) -> None:
    sweep = page.root / "folder"
    (sweep / "points.json").write_text('{"points": [{}, {}]}')
    (sweep / "sweep.json").write_text('{"choice": {"label": "max_staleness=4"}}')
    (sweep / "report.md").write_text("# Choice\n[a run](two/report.md) [none](../secret.md) <https://ui.perfetto.dev>")
    (sweep / "two" / "run.json").write_text('{"finished_steps": 10}')
    [found] = await page.json("/api/sweeps")
    assert (found["id"], found["points"], found["runs"], found["has_report"]) == ("folder", 2, ["folder~two"], True)
    assert (found["finished"], found["recommended"]) == (1, "max_staleness=4")
    html = (await page.ask("/reports/sweeps/folder/report")).text
    assert "<h1>Choice</h1>" in html and '<a href="/#/run/folder~two/report" target="_top">a run</a>' in html
    assert '<a href="../secret.md">none</a>' in html
    assert '<a href="https://ui.perfetto.dev" target="_blank" rel="noopener noreferrer">' in html
    await page.ask("/reports/sweeps/one/report", 404)


async def test_points_of_a_sweep_are_listed_with_the_settings_in_which_they_differ(page: Page) -> None:
    write_metrics(page.root / "folder" / "three", range(1, 3))
    (page.root / "folder" / "three" / "config.yaml").write_text("name: three\nsteps: 10\nmax_staleness: 0\n")
    (page.root / "folder" / "points.json").write_text('{"points": [{}, {}]}')
    found = {run["id"]: run["differing"] for run in await page.json("/api/runs")}
    assert found == {"one": {}, "folder~two": {"max_staleness": 4}, "folder~three": {"max_staleness": 0}}
    assert sorted(await page.json("/api/run-names")) == sorted(found)


async def test_the_list_has_the_reward_curve_at_low_resolution(page: Page) -> None:
    write_metrics(page.root / "one", range(11, 201))
    found = {run["id"]: run["rewards"] for run in await page.json("/api/runs")}
    assert found["folder~two"] == [step / 10 for step in range(1, 11)]
    assert len(found["one"]) == 40 and found["one"] == sorted(found["one"])


async def test_an_event_names_runs_that_were_written_added_or_removed(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "POLL_S", 0.01)
    ending = asyncio.Event()
    stream = stream_list_events(RunsRoot(page.root), ending)
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    (page.root / "three").mkdir()
    (page.root / "three" / "config.yaml").write_text("steps: 1\n")
    assert await asyncio.wait_for(waiting, 5) == 'event: runs\ndata: ["three"]\n\n'
    ending.set()


async def test_the_speed_in_the_list_equals_that_of_the_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with JsonLines(run / "metrics.jsonl") as file:
        for step, spent_s in enumerate((0.1, 0.1, 2.0, 1.0, 3.0), start=1):
            file.write({"kind": "step", "step": step, "time_s": step, "step_s": spent_s, "trained_tokens": 60})
    (run / "config.yaml").write_text("name: run\nsteps: 5\nmax_staleness: 1\n")
    (listed,) = await Page(tmp_path).json("/api/runs")
    assert listed["tokens_per_s"] == pytest.approx(30.0), "three steps of 60 tokens in six seconds"


async def test_idle_shares_come_with_their_means(page: Page) -> None:
    (found,) = await page.json("/api/curves?run=one&key=idle.trainer&key=reward_mean")
    assert found["means"] == {"idle.trainer": pytest.approx(0.2)}
    (without,) = await page.json("/api/curves?run=one&key=idle.rollout")
    assert without["means"] == {}
