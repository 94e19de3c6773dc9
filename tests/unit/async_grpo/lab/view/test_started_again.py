"""A run that is started over in its folder while the page is open: the page shows the new run from its beginning."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from async_grpo.lab.view.columns import ROLLOUT_IDLE, StepColumns
from async_grpo.lab.view.recent_runs import RecentRuns
from async_grpo.lab.view.sample_index import SamplesQuery
from async_grpo.lab.view.sample_search import RunSamples
from async_grpo.lab.view.timeline import RunTimeline, TimelineQuery

SIZES = [pytest.param(2, id="shorter than the old one"), pytest.param(40, id="already longer than the old one")]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder: Path, *, started_s: float, count: int) -> None:
    """Start a run over in the folder, with `count` groups, steps and spans of a second each."""
    shutil.rmtree(folder, ignore_errors=True)
    moments = [started_s + second for second in range(count)]
    completion = {"text": f"of {started_s}", "reward": 1.0, "finish_reason": "stop", "spans": [[0, 0, 4]], "age": 0}
    groups = [{"seq": seq, "time_s": at, "completions": [completion]} for seq, at in enumerate(moments)]
    steps = [{"kind": "step", "step": n + 1, "time_s": at + 1, "step_s": 1.0} for n, at in enumerate(moments)]
    spans = [
        {"track": "generation", "name": f"group {n}", "start_s": at, "end_s": at + 1} for n, at in enumerate(moments)
    ]
    write_rows(folder / "samples" / "rollout-0.jsonl", groups)
    write_rows(folder / "trained.jsonl", [{"step": int(started_s), "groups": {"0": [0.0]}}])
    write_rows(folder / "metrics.jsonl", steps)
    write_rows(folder / "timeline" / "rollout-0.jsonl", [{"role": "rollout-0", **span} for span in spans])


@pytest.mark.parametrize("count", SIZES)
def test_samples_come_from_the_new_run(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "run"
    write_run(folder, started_s=1000, count=20)
    samples = RunSamples(folder)
    assert samples.search(SamplesQuery())["groups"] == 20

    write_run(folder, started_s=2000, count=count)

    page = samples.search(SamplesQuery(sort="oldest", q="of 2000"))
    assert (page["groups"], page["unreadable"], page["facts"]["steps"]) == (count, 0, 2000)
    assert [item["seq"] for item in page["items"]] == list(range(min(count, 25)))


@pytest.mark.parametrize("count", SIZES)
def test_the_timeline_comes_from_the_new_run(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "run"
    write_run(folder, started_s=1000, count=20)
    timeline = RunTimeline(folder)
    assert timeline.render_range(TimelineQuery())["whole"] == 20

    write_run(folder, started_s=2000, count=count)

    picture = timeline.render_range(TimelineQuery())
    assert (picture["origin_s"], picture["whole"]) == (2000, count)
    assert len(picture["rows"][0]["spans"]) == count


@pytest.mark.parametrize("count", SIZES)
def test_curves_come_from_the_new_run(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "run"
    write_run(folder, started_s=1000, count=20)
    columns = StepColumns(folder)
    columns.read_new_rows()
    columns.read_new_spans()

    write_run(folder, started_s=2000, count=count)

    columns.read_new_rows()
    columns.read_new_spans()
    assert columns.column("time_s").tolist() == [2001 + n for n in range(count)]
    assert columns.column(ROLLOUT_IDLE).tolist() == [0.0] * count


def test_a_server_missing_from_the_new_run_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, started_s=1000, count=3)
    write_rows(folder / "samples" / "rollout-1.jsonl", [{"seq": 9, "time_s": 1.0, "completions": []}])
    samples = RunSamples(folder)
    assert samples.search(SamplesQuery())["groups"] == 4

    write_run(folder, started_s=1000, count=3)

    assert samples.search(SamplesQuery())["groups"] == 3


def test_parallel_requests_for_a_run_share_its_index(tmp_path: Path) -> None:
    made: list[Path] = []
    both_asked = threading.Barrier(2)

    def read_index(path: Path) -> Path:
        made.append(path)
        with pytest.raises(threading.BrokenBarrierError):
            both_asked.wait(timeout=0.2)  # the other request must not get here too
        return path

    runs = RecentRuns(read_index)
    threads = [threading.Thread(target=runs.get_run, args=(tmp_path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert made == [tmp_path]
