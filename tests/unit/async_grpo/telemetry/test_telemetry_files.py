"""Files that a run writes while it goes on: rows, timeline, TensorBoard events, log lines."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.telemetry.jsonl import JsonLines, RowFollower, read_rows
from async_grpo.telemetry.logging import configure_logging, redact_secrets
from async_grpo.telemetry.timeline import Timeline, merge_timelines


def test_rows_come_back_in_order_even_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    assert read_rows(path) == []
    with JsonLines(path) as rows:
        rows.write({"step": 1, "text": "a\nb"})
        rows.write({"step": 2})
        assert read_rows(path) == [{"step": 1, "text": "a\nb"}, {"step": 2}]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b'{"text": "\xe2\x82'], ids=["row", "character"])
def test_a_torn_last_line_harms_only_itself(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    assert read_rows(path) == [{"step": 1}]
    with JsonLines(path) as rows:
        rows.write({"step": 3})
    assert read_rows(path) == [{"step": 1}, {"step": 3}]


def test_a_follower_gives_every_whole_row_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    follower = RowFollower(path)
    assert follower.read_new_rows() == []
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert follower.read_new_rows() == [{"step": 1}]
    assert follower.read_new_rows() == []
    with path.open("ab") as file:
        file.write(b'ss": 0}\n{"step": 3}\n')
    assert follower.read_new_rows() == [{"step": 2, "loss": 0}, {"step": 3}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_non_finite_floats_become_null(tmp_path: Path, value: Any) -> None:
    with JsonLines(tmp_path / "rows.jsonl") as rows:
        rows.write({"loss": value, "nested": [value, 1]})
    assert read_rows(tmp_path / "rows.jsonl") == [{"loss": None, "nested": [None, 1]}]


def test_numpy_numbers_and_lone_surrogates_can_be_written(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "rows.jsonl") as rows:
        rows.write({"tokens": np.int64(3), "mean": np.float32(0.5), "text": "a\ud800b", "ages": {0: 1}})
    assert read_rows(tmp_path / "rows.jsonl") == [{"tokens": 3, "mean": 0.5, "text": "a?b", "ages": {"0": 1}}]


def merged(run_dir: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(merge_timelines(run_dir).read_text())["traceEvents"]
    return events


def test_the_timeline_has_a_process_per_role_and_a_thread_per_track(tmp_path: Path) -> None:
    for role, track in (("rollout-0", "updates"), ("trainer", "loop"), ("trainer", "weights")):
        Timeline(tmp_path / "timeline" / f"{role}.jsonl", role).span(track, "x", 10.0, 11.0)
    events = merged(tmp_path)
    names = [(e["name"], e["args"]["name"], e["pid"]) for e in events if e["name"].endswith("_name")]
    assert names == [
        ("process_name", "trainer", 1),
        ("thread_name", "loop", 1),
        ("thread_name", "weights", 1),
        ("process_name", "rollout-0", 2),
        ("thread_name", "updates", 2),
    ]


def test_timeline_times_are_microseconds_since_the_first_event(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline" / "trainer.jsonl", "trainer")
    timeline.span("loop", "train", 1.7e9 + 0.5, 1.7e9 + 0.75, step=3)
    timeline.instant("loop", "publish", 1.7e9)
    span = next(event for event in merged(tmp_path) if event["ph"] == "X")
    instant = next(event for event in merged(tmp_path) if event["ph"] == "i")
    assert (span["ts"], span["dur"], span["args"]) == (500_000, 250_000, {"step": 3})
    assert (instant["ts"], instant["s"]) == (0, "t")


def test_overlapping_spans_of_a_track_get_lanes_of_their_own(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline" / "rollout-0.jsonl", "rollout-0")
    for name, start_s, end_s in (("a", 0.0, 3.0), ("b", 1.0, 2.0), ("c", 2.0, 4.0), ("d", 3.0, 5.0)):
        timeline.span("groups", name, start_s, end_s)
    lanes = {event["name"]: event["tid"] for event in merged(tmp_path) if event["ph"] == "X"}
    assert lanes == {"a": 1, "b": 2, "c": 2, "d": 1}


def test_a_damaged_timeline_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "trainer.jsonl"
    Timeline(path, "trainer").span("loop", "train", 1.0, 2.0)
    with path.open("ab") as file:
        file.write(b'{"role": "trainer", "track": "loop"}\n{"role": "tra')
    assert [event["name"] for event in merged(tmp_path) if event["ph"] == "X"] == ["train"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://me:pw@host:6379/0", "redis://me:***@host:6379/0"),
        ("rediss://:p@ss/w:rd@host", "rediss://:***@host"),
        ("url='redis://a:b@h', again", "url='redis://a:***@h', again"),
        ("password=hunter2 step=1", "password=*** step=1"),
        ("redis://host?password=pw&db=1", "redis://host?password=***&db=1"),
        ("tcp://127.0.0.1:5555 me@example.org", "tcp://127.0.0.1:5555 me@example.org"),
        ("generated_tokens=12", "generated_tokens=12"),
        ("HF_TOKEN=hf_abcdef next", "HF_TOKEN=*** next"),
        ("https://h/?access_token=zzz&b=1", "https://h/?access_token=***&b=1"),
        ("Authorization: Bearer abc.123-x", "Authorization: Bearer ***"),
        ('{"api_key": "xyz", "n": 1}', '{"api_key": ***, "n": 1}'),
        ("WANDB_API_KEY=xyz", "WANDB_API_KEY=***"),
        ("eos_token: stop, a bearer of news", "eos_token: ***, a bearer of news"),
        ("token 7 of 9", "token 7 of 9"),
    ],
)
def test_secrets_are_hidden_and_the_rest_is_kept(text: str, shown: str) -> None:
    assert redact_secrets(text) == shown


def test_a_log_line_names_level_role_and_facts_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("trainer").warning("step trained", step=3, text="a\nb")
    line = capsys.readouterr().err
    assert line.endswith("warning trainer    step trained  step=3 text='a\\nb'\n")


def test_a_traceback_is_redacted_too(capsys: pytest.CaptureFixture[str]) -> None:
    logger = configure_logging("rollout-0")
    try:
        raise ConnectionError("redis://me:hunter2@host refused")
    except ConnectionError:
        logger.exception("lost")
    text = capsys.readouterr().err
    assert "ConnectionError" in text and "hunter2" not in text


def test_importing_telemetry_loads_no_heavy_package() -> None:
    library = ("logging", "jsonl", "metrics", "trackers.tensorboard", "timeline")
    report = ("summary", "live_view", "plots", "run_report")
    imports = ", ".join(
        [f"async_grpo.telemetry.{name}" for name in library] + [f"async_grpo.app.report.{name}" for name in report]
    )
    heavy = "{'torch', 'vllm', 'megatron', 'matplotlib', 'tensorboard', 'buffer'}"
    code = f"import sys, {imports}; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
