"""The view of samples in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.view_runs import HOSTILE, sample_row, write_run, write_samples
from tests.view.conftest import HOSTILE_RUN, serving, view_of


def facts_of(page: Any) -> dict[str, str]:
    """What the panel says of the token that is pointed at."""
    entries = page.locator(".token-panel span:has(> b)").all()
    return {entry.locator("b").inner_text().strip(): entry.inner_text() for entry in entries}


def test_what_a_token_tells_when_it_is_pointed_at_and_by_keyboard(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(address, "plain", "samples?sort=oldest&order=sampled"))
    row = sample_row(0)
    page.locator(".completion").nth(1).locator("[data-place='3']").hover()
    first = row["completions"][1]
    assert facts_of(page)["token"] == "token 4 of 24"
    assert facts_of(page)["log-probability"] == f"log-probability {first['logprobs'][3]:.4f}".rstrip("0")
    assert facts_of(page)["policy version"] == "policy version v0"
    assert facts_of(page)["age"] == "age 1 when trained"
    assert facts_of(page)["advantage"] == "advantage 0.5"
    page.locator(".completion .tokens").first.focus()
    page.keyboard.press("End")
    assert facts_of(page)["token"] == "token 24 of 24" and facts_of(page)["policy version"] == "policy version v1"
    page.keyboard.press("ArrowLeft")
    assert facts_of(page)["token"] == "token 23 of 24"


def test_tokens_are_told_apart_by_more_than_their_colour(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(address, "plain", "samples?sort=oldest&order=sampled"))
    tokens = page.locator(".completion").first.locator(".token")
    styles = [tokens.nth(place).evaluate("e => getComputedStyle(e).borderBottomStyle") for place in (0, 23)]
    assert styles == ["solid", "dashed"]
    assert page.locator(".completion").first.locator(".mark").all_inner_texts() == ["v0", "v1"]
    assert "v1 age 0, 48 tokens" in page.locator(".legend").first.inner_text()


def test_tokens_without_a_gradient_say_why(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = write_run(tmp_path / "runs" / "tools", groups=4)
    row = sample_row(77)
    row["completions"][0]["turns"] = [[0, 15, True], [15, 20, False], [20, 24, True]]
    write_samples(run, [{**row, "time_s": 1.8e9}])
    with (run / "trained.jsonl").open("a") as file:
        file.write('{"step": 21, "skipped": false, "mask_below": 20, "groups": {"77": null}}\n')
    with serving(tmp_path / "runs") as address:
        page = open_page(view_of(address, "tools", "samples?order=sampled"))
        first = page.locator(".completion").first
        seen = {}
        for place in (3, 13, 17):
            first.locator(f"[data-place='{place}']").hover()
            seen[place] = facts_of(page)
        stripes = first.locator(".tool").count()
        page.close()
    assert stripes == 5
    assert seen[3]["gradient"] == "gradient no: older than the bound, context only"
    assert seen[13]["advantage"] == "advantage not recorded: the KL penalty is in the reward"
    assert "gradient" not in seen[13]
    assert seen[17]["log-probability"] == "log-probability none: the environment wrote it"


def test_completions_are_sorted_by_reward_and_fit_the_screen(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(address, "plain", "samples?sort=oldest"))
    page.locator(".completion").nth(3).wait_for()
    titles = page.locator(".completion h3")
    assert titles.all_inner_texts() == [f"Completion {place}" for place in (2, 4, 1, 3)]
    page.locator(".group-detail select").select_option("as sampled")
    assert titles.all_inner_texts() == [f"Completion {place}" for place in (1, 2, 3, 4)]
    assert "order=sampled" in page.url
    boxes = [card.bounding_box() for card in page.locator(".completion").all()]
    assert all(box["x"] + box["width"] <= 1280 for box in boxes), "cards wrap into rows"


def test_search_filters_and_the_first_time_it_reasoned(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(address, "plain", "samples"))
    page.get_by_label("Search", exact=True).fill("17+1=")
    page.keyboard.press("Enter")
    page.locator(".status").filter(has_text=", 1 shown").wait_for()
    assert "Group 17" in page.locator(".groups").inner_text()
    page.get_by_text("First time it reasoned").click()
    page.get_by_role("button", name="Find the first").click()
    page.locator(".groups li").first.filter(has_text="Group 0").wait_for()
    assert page.locator(".groups li mark").first.inner_text() == "<think>"
    assert "sort=oldest" in page.url
    page.get_by_text("Filters", exact=True).click()
    page.get_by_role("button", name="Clear").click()
    page.locator(".groups li").first.filter(has_text="Group 40").wait_for()
    page.get_by_label("State").select_option("unverifiable")
    page.locator(".status").filter(has_text="1 of 41 groups").wait_for()


def test_what_models_wrote_stays_text(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(address, HOSTILE_RUN, "samples"))
    page.locator(".completion").first.wait_for()
    shown = page.locator("main").inner_text()
    assert "<script>alert('ran')</script>" in shown and "U+202E" in shown and "U+001B" in shown
    assert "crash: <script>" in shown and HOSTILE_RUN in shown
    assert "\u202e" not in page.locator("main").inner_html() and "\x1b" not in page.locator("main").inner_html()
    assert page.locator("main script, main img, main b b").count() == 0
    assert page.locator("script").count() == 1
    page.get_by_label("Search", exact=True).fill(HOSTILE[:30])
    page.keyboard.press("Enter")
    page.locator(".groups mark").wait_for()
    assert "<script>" in page.locator(".groups mark").inner_text()


def test_a_group_that_comes_appears_by_itself(address: str, runs: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(address, HOSTILE_RUN, "samples"))
    page.locator(".completion").first.wait_for()
    page.locator(".groups button").nth(1).focus()
    write_samples(runs / HOSTILE_RUN, [{**sample_row(41), "prompt": "brand new", "time_s": 1.8e9}])
    page.locator(".groups li").first.filter(has_text="brand new").wait_for(timeout=5000)
    assert page.locator("#live").inner_text() == "live"
    assert page.locator(".groups button:focus").inner_text().startswith("Group 39"), "the reader's place is kept"
    assert page.locator(".group-detail h2").inner_text() == "Group 40", "and so is what is being read"


def test_pages_of_groups_follow(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(view_of(address, "plain", "samples"))
    page.get_by_role("button", name="More groups").click()
    page.locator(".groups li").nth(40).wait_for()
    assert page.get_by_role("button", name="More groups").is_hidden()
