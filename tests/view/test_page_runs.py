"""The views of runs in Chromium: the list, curves beside each other, staleness, logs; live, and with hostile texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.lab.view.vendor import UPLOT, is_unpacked
from tests.support.view_runs import HOSTILE, write_metrics, write_run
from tests.view.conftest import HOSTILE_RUN, NARROW, serving, view_of

needs_charts = pytest.mark.skipif(not is_unpacked(UPLOT), reason="needs uPlot: python -m async_grpo.lab.view.vendor")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a page, and its folder of runs, which tests may change."""
    root = tmp_path_factory.mktemp("shown") / "runs"
    for name in ("first", "folder/second"):
        write_run(root / name)
    write_run(root / HOSTILE_RUN)
    (root / "folder" / "second" / "config.yaml").write_text("steps: 10\nmax_staleness: 4\n")
    (root / HOSTILE_RUN / "logs").mkdir()
    (root / HOSTILE_RUN / "logs" / "trainer.log").write_text(f"line one\n{HOSTILE}\n")
    with serving(root) as address:
        yield address, root


def test_runs_are_filtered_sorted_and_chosen_for_a_comparison(
    shown: tuple[str, Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(shown[0])
    page.locator("main td a").first.wait_for()
    assert HOSTILE_RUN in page.locator("main table").inner_text()
    page.get_by_role("button", name="Run").click()
    assert page.locator("main td a").first.inner_text() == HOSTILE_RUN and "sort=-name" in page.url
    page.get_by_label("Filter").fill("s")
    page.get_by_label("Choose first").check()
    page.get_by_label("Choose folder/second").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.locator(".differences").filter(has_text="max_staleness").wait_for()
    row = page.locator(".differences tbody tr").filter(has_text="max_staleness")
    assert row.locator("td").all_inner_texts() == ["2", "4"]


@needs_charts
def test_a_chart_is_read_by_keyboard_and_a_run_can_be_hidden(
    shown: tuple[str, Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(f"{shown[0]}/#/compare?run=first&run=folder~second")
    chart = page.locator(".chart").filter(has_text="reward, mean")
    chart.locator("canvas").wait_for()
    values = [item.strip() for item in chart.locator(".values li").all_inner_texts()]
    assert values == ["last", "first 1", "folder/second 1"]
    chart.locator(".plot").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    chart.locator(".values").filter(has_text="step 2").wait_for()
    assert "first 0.2" in chart.locator(".values").inner_text()
    page.get_by_role("button", name="folder/second").click()
    assert "folder/second" not in chart.locator(".values").inner_text()


@needs_charts
def test_a_live_run_grows_in_its_chart_without_a_reload(shown: tuple[str, Path], open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(shown[0], "first", "staleness"))
    page.locator(".verdict-line").filter(has_text="oldest trained token was 2 steps").wait_for()
    page.locator(".age-strip p").filter(has_text="From step 10: age 0: 50%, age 1: 50%").wait_for()
    write_metrics(shown[1] / "first", range(11, 14))
    page.locator(".chart .values").filter(has_text="trained 52").wait_for()  # 4 groups a step
    assert page.locator("#live").inner_text() == "live"
    page.locator(".age-strip canvas").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.locator(".age-strip p").filter(has_text="From step 13").wait_for()


@needs_charts
def test_the_overview_answers_three_questions_with_their_curves(
    shown: tuple[str, Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(view_of(shown[0], "folder~second", "overview"))
    page.locator(".badge-good").first.wait_for()
    blocks = page.locator(".answer")
    titles = [title.split("\n")[0] for title in blocks.locator("h2").all_inner_texts()]
    assert [title.partition("?")[0] for title in titles] == ["Is it learning", "Is it fast", "Is it sound"]
    assert "Training reward rose: 0.100 → 1.000" in blocks.first.inner_text()
    blocks.first.locator("canvas").first.wait_for()
    blocks.nth(2).locator(".values").filter(has_text="oldest").wait_for()
    assert "async-grpo why" in page.locator(".next").inner_text()
    changed = page.get_by_role("region", name="Settings that differ from the defaults")
    assert "max_staleness" in changed.inner_text() and "name" not in changed.inner_text()
    assert page.get_by_role("region", name="All settings").is_hidden()


def test_a_live_run_shows_its_remaining_time_or_its_silence(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = write_run(tmp_path / "runs" / "now")
    with RunFolder(run).locked(), serving(tmp_path / "runs") as address:
        page = open_page(view_of(address, "now", "overview"))
        page.locator(".fact").filter(has_text="unknown: no step for").wait_for()
        assert page.locator("progress").get_attribute("value") == "10"
        page.close()


def test_another_run_is_chosen_without_leaving_the_view(shown: tuple[str, Path], open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(shown[0], "first", "staleness"))
    page.locator("#run-choice option").nth(2).wait_for(state="attached")
    page.get_by_label("Run", exact=True).select_option("folder~second")
    page.get_by_role("heading", name="folder/second staleness").wait_for()
    assert page.url.endswith("/run/folder~second/staleness")


@needs_charts
def test_curves_are_found_enlarged_and_downloaded(shown: tuple[str, Path], open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(shown[0], "folder~second", "curves"))
    chart = page.locator(".chart").filter(has_text="reward, mean")
    chart.locator("canvas").wait_for()
    page.get_by_label("Find").fill("reward, mean")
    assert page.locator(".chart:visible").count() == 1 and "find=reward" in page.url
    small = chart.bounding_box()["width"]
    chart.get_by_role("button", name="Enlarge").click()
    assert chart.bounding_box()["width"] > 1.5 * small
    with page.expect_download() as download:
        chart.get_by_role("button", name="as CSV").click()
    assert download.value.path().read_text().splitlines()[:2] == ['"step","reward, mean"', "1,0.1"]
    with page.expect_download() as download:
        chart.get_by_role("button", name="as PNG").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")


def test_points_of_a_sweep_are_listed_by_what_differs(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    sweep = tmp_path / "runs" / "grid"
    for staleness in (0, 4):
        run = write_run(sweep / "runs" / f"max_staleness.{staleness}")
        (run / "config.yaml").write_text(f"name: {run.name}\nsteps: 10\nmax_staleness: {staleness}\n")
    (sweep / "points.json").write_text('{"points": [{}, {}]}')
    with serving(tmp_path / "runs") as address:
        page = open_page(address)
        page.locator(".sweep-row").filter(has_text="grid · sweep of 2 runs").wait_for()
        assert sorted(page.locator(".point a").all_inner_texts()) == ["max_staleness=0", "max_staleness=4"]
        assert page.locator(".point .sparkline polyline").count() == 2
        page.locator(".sweep-row a").click()
        page.get_by_role("heading", name="grid sweep").wait_for()
        page.close()


def test_a_log_is_searched(shown: tuple[str, Path], open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(shown[0], HOSTILE_RUN, "logs"))
    page.locator("pre.log").filter(has_text="line one").wait_for()
    page.get_by_label("Find").fill("LINE")
    page.wait_for_function("() => !document.querySelector('pre.log').innerText.includes('script')")
    assert "line one" in page.locator("pre.log").inner_text() and "q=LINE" in page.url
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert HOSTILE.partition(" ")[0] in download.value.path().read_text()


def test_warnings_and_logs_stay_text(shown: tuple[str, Path], open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(shown[0], HOSTILE_RUN, "overview"))
    page.locator("main li").filter(has_text="<script>alert('ran')</script>").first.wait_for()
    assert page.locator("main script, main img").count() == 0
    page.get_by_role("link", name="Logs").click()
    page.locator("pre.log").filter(has_text="line one").wait_for()
    assert "<img src=x" in page.locator("pre.log").inner_text()
    assert page.locator("main script, main img").count() == 0


def test_without_uplot_the_page_says_how_to_get_it(shown: tuple[str, Path], open_page: Callable[..., Any]) -> None:
    page = open_page("about:blank")
    page.route("**/api/metrics", lambda route: route.fulfill(json={**route.fetch().json(), "charts": False}))
    page.goto(f"{shown[0]}/#/run/first/curves")
    page.locator(".note").filter(has_text="python -m async_grpo.lab.view.vendor").wait_for()
    page.locator(".chart .values").filter(has_text="last").first.wait_for()


def test_a_sweep_leads_to_the_reports_of_its_runs(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    sweep = tmp_path / "runs" / "grid"
    run = write_run(sweep / "runs" / "S=0")
    (sweep / "points.json").write_text('{"points": [{}]}')
    (sweep / "sweep.json").write_text('{"choice": {"label": "max_staleness=0"}}')
    (sweep / "report.md").write_text(
        "| setting | figures |\n|---|--:|\n| [S=0](runs/S=0/report.md) | " + "9 " * 200 + "|\n"
    )
    (run / "report.md").write_text("# Done\n\n<details><summary>settings</summary>\n\nsteps: 10\n\n</details>\n")
    with serving(tmp_path / "runs") as address:
        page = open_page(f"{address}/#/sweeps", viewport=NARROW)
        page.get_by_role("row", name="max_staleness=0").get_by_role("link").click()
        frame = page.frame_locator("iframe")
        frame.get_by_role("link", name="S=0").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        frame.get_by_role("link", name="S=0").click()
        page.get_by_role("heading", name="grid/runs/S=0 report").wait_for()
        frame.get_by_text("settings").click()
        frame.get_by_text("steps: 10").wait_for()
        page.close()


def test_a_report_has_its_tables_and_no_scripts(shown: tuple[str, Path], open_page: Callable[..., Any]) -> None:
    run = shown[1] / "folder" / "second"
    (run / "report.md").write_text(f"# Done\n\n{HOSTILE}\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n")
    page = open_page(f"{shown[0]}/#/run/{quote('folder~second')}/report")
    frame = page.frame_locator("iframe")
    frame.locator("td.number").filter(has_text="2").wait_for()
    assert "<script>alert('ran')</script>" in frame.locator("body").inner_text()
    assert frame.locator("script, img").count() == 0
