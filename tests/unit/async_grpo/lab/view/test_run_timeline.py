"""What of a timeline a screen shows: merged spans, densities, and the shares of a range."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.lab.view import followed
from async_grpo.lab.view import timeline as timeline_of_view
from async_grpo.lab.view.timeline import RunTimeline, TimelineQuery


def write(folder: Path, role: str, *spans: tuple[str, str, float, float]) -> None:
    (folder / "timeline").mkdir(exist_ok=True)
    with (folder / "timeline" / f"{role}.jsonl").open("a") as file:
        for track, name, start, end in spans:
            row = {"role": role, "track": track, "name": name, "start_s": 100 + start, "end_s": 100 + end}
            file.write(json.dumps(row) + "\n")


def row_of(picture: dict[str, Any], track: str) -> dict[str, Any]:
    (row,) = [row for row in picture["rows"] if row["track"] == track]
    return row


def test_spans_below_a_pixel_are_merged_under_the_kind_that_took_longest(tmp_path: Path) -> None:
    steps = [
        ("trainer", "wait" if n % 2 else f"train {n}", n / 100, n / 100 + (0.002 if n % 2 else 0.006))
        for n in range(100)
    ]
    write(tmp_path, "trainer", *steps, ("trainer", "wait", 1.0, 100.0))
    (*merged, last) = row_of(RunTimeline(tmp_path).render_range(TimelineQuery(pixels=100)), "trainer")["spans"]
    assert [(span[0], span[3], span[4], span[5]) for span in merged] == [(0, "train", 100, "train")]
    assert last[3:] == ["wait", 1, "wait", None]
    near = row_of(RunTimeline(tmp_path).render_range(TimelineQuery(start=0.0, end=0.1, pixels=100)), "trainer")["spans"]
    assert len(near) == 11 and near[0][1:5] == [0.0, 0.006, "train 0", 1]


def test_spans_in_different_pixels_or_lanes_stay_separate(tmp_path: Path) -> None:
    ticks = [("generation", "group", at, at + 0.1) for at in (0.0, 0.1, 5.0, 5.05)]
    write(tmp_path, "rollout-0", *ticks, ("wait", "ticket", 0.0, 100.0))
    spans = row_of(RunTimeline(tmp_path).render_range(TimelineQuery(pixels=100)), "generation")["spans"]
    assert [(span[0], span[1], span[4]) for span in spans] == [(0, 0.0, 2), (0, 5.0, 1), (1, 5.05, 1)]


def test_a_track_with_many_lanes_is_a_density_until_expanded(tmp_path: Path) -> None:
    write(tmp_path, "rollout-0", *[("generation", f"group {n}", 0.0, 5.0) for n in range(8)], ("wait", "ticket", 5, 10))
    timeline = RunTimeline(tmp_path)
    row = row_of(timeline.render_range(TimelineQuery(pixels=50)), "generation")
    assert row["lanes"] == 8 and row["density"] == pytest.approx([8.0] * 25 + [0.0] * 25)
    spans = row_of(timeline.render_range(TimelineQuery(expand=["rollout-0/generation"])), "generation")["spans"]
    assert sorted(span[0] for span in spans) == list(range(8))


def test_the_shares_of_a_range_count_overlaps_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        "rollout-0",
        ("generation", "group 0", 0, 4),
        ("generation", "group 1", 2, 6),
        ("wait", "ticket", 6, 10),
    )
    write(tmp_path, "trainer", ("trainer", "wait", 0, 3), ("trainer", "train", 3, 10))
    timeline = RunTimeline(tmp_path)
    whole = timeline.render_range(TimelineQuery())["shares"]
    assert [(each["role"], each["idle"]) for each in whole] == [
        ("trainer", pytest.approx(0.3)),
        ("rollout-0", pytest.approx(0.4)),
    ]
    part = timeline.render_range(TimelineQuery(start=2.0, end=4.0))["shares"]
    assert [each["idle"] for each in part] == [pytest.approx(0.5), pytest.approx(0.0)]


def test_idle_shares_equal_those_of_the_report(tmp_path: Path) -> None:
    write(
        tmp_path,
        "rollout-0",
        ("generation", "group 0", 0, 5),
        ("evaluation", "version 0", 4, 6),
        ("weights", "v", 6, 10),
    )
    write(tmp_path, "trainer", ("trainer", "start", 0, 4), ("trainer", "wait", 4, 5), ("trainer", "train", 5, 10))
    shares = RunTimeline(tmp_path).render_range(TimelineQuery())["shares"]
    assert [each["idle"] for each in shares] == [pytest.approx(0.1), pytest.approx(0.4)]


def test_new_spans_appear_and_broken_rows_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, "trainer", ("trainer", "train", 0, 1))
    with (tmp_path / "timeline" / "x.jsonl").open("w") as file:
        file.write('{"role": 1}\nnothing\n{"role": "x", "track": "t", "name": "instant", "start_s": 101}\n{"role"')
    timeline = RunTimeline(tmp_path)
    assert [len(row["spans"]) for row in timeline.render_range(TimelineQuery())["rows"]] == [1, 1]
    with (tmp_path / "timeline" / "x.jsonl").open("a") as file:
        file.write(': "x", "track": "t", "name": "backwards", "start_s": 102, "end_s": 1}\n')
    write(tmp_path, "publisher", ("publisher", "encode", -1, 5))
    later = timeline.render_range(TimelineQuery())
    assert [span[1:4] for span in row_of(later, "t")["spans"]] == [[2.0, 2.0, "instant"], [3.0, 3.0, "backwards"]]
    assert later["whole"] == 6.0 and [row["role"] for row in later["rows"]] == ["trainer", "publisher", "x"]


def test_a_long_track_is_sorted_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_of_view, "FAST_EVENTS", 1)
    write(tmp_path, "trainer", ("trainer", "train", 0, 1))
    timeline = RunTimeline(tmp_path)
    assert timeline.render_range(TimelineQuery())["behind"] is False
    write(tmp_path, "trainer", ("trainer", "train", 2, 3))
    early = timeline.render_range(TimelineQuery())
    assert early["behind"] is True and len(row_of(early, "trainer")["spans"]) == 1
    monkeypatch.setattr(timeline_of_view, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60))
    late = timeline.render_range(TimelineQuery())
    assert late["behind"] is False and len(row_of(late, "trainer")["spans"]) == 2


def test_a_long_timeline_is_shown_while_it_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "SLICE_BYTES", 300)
    monkeypatch.setattr(timeline_of_view, "READ_S", 0)
    write(tmp_path, "trainer", *[("trainer", "train", step, step + 1) for step in range(12)])
    timeline = RunTimeline(tmp_path)
    pictures = [timeline.render_range(TimelineQuery()) for _ in range(12)]
    assert 0 < pictures[0]["read"] < 1 and pictures[0]["behind"] and 0 < pictures[0]["whole"] < 12
    assert (pictures[-1]["read"], pictures[-1]["behind"], pictures[-1]["whole"]) == (1, False, 12)


def test_a_run_without_a_timeline_is_empty(tmp_path: Path) -> None:
    picture = RunTimeline(tmp_path).render_range(TimelineQuery())
    assert (picture["rows"], picture["whole"], picture["shares"]) == ([], 0.0, [])


def test_a_restarted_role_has_its_outage(tmp_path: Path) -> None:
    write(
        tmp_path,
        "rollout-0",
        ("process", "started", 0, 0),
        ("generation", "group 0", 1, 4),
        ("process", "started", 9, 9),
        ("weights", "version 1", 10, 11),
        ("generation", "group 1", 12, 13),
    )
    write(tmp_path, "trainer", ("trainer", "start", 0, 2), ("trainer", "train", 2, 3), ("trainer", "start", 8, 9))
    outages = RunTimeline(tmp_path).render_range(TimelineQuery())["outages"]
    assert {(outage["role"], outage["start"], outage["end"]) for outage in outages} == {
        ("rollout-0", 4.0, 12.0),
        ("trainer", 3.0, 8.0),
    }


def test_waits_for_processors_are_shares_of_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    row = {"role": "rollout-0", "track": "cpu", "name": "waited", "start_s": 0.0, "end_s": 10.0}
    (tmp_path / "timeline" / "rollout-0.jsonl").write_text(json.dumps({**row, "args": {"waited_s": 2.0}}) + "\n")
    timeline = RunTimeline(tmp_path)
    for query in (TimelineQuery(), TimelineQuery(start=5.0, end=10.0)):
        (part,) = timeline.render_range(query)["shares"][0]["parts"]
        assert part == {"track": "cpu", "kind": "cpu", "share": pytest.approx(0.2)}
