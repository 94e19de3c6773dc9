"""The view of the timeline in Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.telemetry.jsonl import JsonLines
from tests.support.view_runs import STARTED_S, write_run
from tests.view.conftest import serving, view_of


@pytest.fixture
def page(address: str, open_page: Callable[..., Any]) -> Any:
    page = open_page(view_of(address, "plain", "timeline"))
    page.locator(".readout li").first.wait_for()
    return page


def test_the_range_that_is_seen_has_its_shares(page: Any) -> None:
    shown = page.locator(".readout").inner_text()
    assert "Whole run: 10 s" in shown
    assert "trainer: waits for a batch 30%; train 60%, publish 10%" in shown
    assert "rollout-0: generates nothing 10%; generation 90%, weights 5%" in shown


def test_it_zooms_and_moves_by_keyboard(page: Any) -> None:
    page.locator("canvas").focus()
    page.keyboard.press("+")
    page.locator(".readout h3").filter(has_text="From 2 s to 8 s").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator(".readout h3").filter(has_text="From 3.2 s to 9.2 s").wait_for()
    page.keyboard.press("Home")
    page.locator(".readout h3").filter(has_text="Whole run").wait_for()


def test_it_zooms_with_the_wheel_moves_and_measures_by_dragging(page: Any) -> None:
    box = page.locator("canvas").bounding_box()
    at = box["y"] + 50

    def x(seconds: float) -> float:
        return float(box["x"] + box["width"] * seconds / 10)

    page.keyboard.down("Shift")
    page.mouse.move(x(0.0), at)
    page.mouse.down()
    page.mouse.move(x(5.0), at)
    page.mouse.up()
    page.keyboard.up("Shift")
    page.locator(".readout h3").filter(has_text=re.compile("From 0 s to (5|4.99)")).wait_for()
    page.mouse.move(x(5.0), at)
    page.mouse.wheel(0, -400)
    page.locator(".readout h3").filter(has_text="(3.679 s)").wait_for()
    page.mouse.down()
    page.mouse.move(x(5.0) - box["width"], at)
    page.mouse.up()
    page.locator(".readout h3").filter(has_text="to 10 s").wait_for()


def test_a_span_tells_of_itself_and_lanes_can_be_seen_one_by_one(page: Any) -> None:
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.06, box["y"] + 50)
    assert page.locator(".tip").inner_text().startswith("train\ntrainer · 0.3 s, 600 ms")
    before = box["height"]
    page.get_by_label("each of the 8 lanes").check()
    page.wait_for_function("height => document.querySelector('canvas').clientHeight > height", arg=before)


def test_names_of_spans_stay_text(page: Any) -> None:
    page.get_by_label("each of the 8 lanes").check()
    page.locator(".legend").filter(has_text="generation").wait_for()
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.05, box["y"] + 175)
    assert "<script>alert" in page.locator(".tip").inner_text()
    assert page.locator("script").count() == 1


def test_the_time_in_which_a_role_was_away_is_marked(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = write_run(tmp_path / "runs" / "killed")
    with JsonLines(run / "timeline" / "rollout-0.jsonl") as file:
        for start, track, name in ((0.0, "process", "started"), (20.0, "process", "started")):
            file.write({"role": "rollout-0", "track": track, "name": name, "start_s": STARTED_S + start})
        group = {"role": "rollout-0", "track": "generation", "name": "group 99"}
        file.write({**group, "start_s": STARTED_S + 24.0, "end_s": STARTED_S + 25.0})
    with serving(tmp_path / "runs") as address:
        page = open_page(view_of(address, "killed", "timeline"))
        page.locator(".legend").filter(has_text="away: died and was started again").wait_for()
        box = page.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 120)
        page.locator(".tip").filter(has_text="its process died").wait_for()
        page.close()
