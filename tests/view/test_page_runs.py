"""The views of runs in Chromium: the list, curves beside each other, staleness, logs; live, and with hostile texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

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
