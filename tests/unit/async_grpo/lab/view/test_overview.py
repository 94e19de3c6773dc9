"""The overview of a run: verdict, progress of a live run, advice, and the settings that differ from their defaults."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.lab.view import overview
from async_grpo.lab.view.catalog import RunsRoot
from async_grpo.lab.view.columns import StepColumns
from async_grpo.lab.view.overview import measure_progress
from async_grpo.lab.view.server import make_app
from async_grpo.telemetry.jsonl import JsonLines
from tests.support.view_runs import STARTED_S, write_metrics, write_run

CONFIG = "name: one\nsteps: 20\nmax_staleness: 2\nmodel: {random: {}}\nrollout: {max_concurrency: 7}\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "runs" / "one")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


async def fetch(run: Path, path: str = "") -> Any:
    app = make_app(RunsRoot(run.parent), asyncio.Event())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get(f"/api/runs/{run.name}{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_run_without_a_summary_has_a_verdict_from_its_rows(run: Path) -> None:
    found = await fetch(run)
    answers = {answer["question"]: answer for answer in found["verdict"]}
    assert answers["learning"]["state"] == "yes" and "0.100 → 1.000" in answers["learning"]["text"]
    assert answers["speed"]["state"] == "check" and "20% of its time" in answers["speed"]["text"]
    assert answers["soundness"]["state"] == "check" and "1 warning" in answers["soundness"]["text"]
    assert found["progress"] is None


async def test_a_summary_counts_unless_it_is_of_an_earlier_invocation(run: Path) -> None:
    summary = {"steps": 10, "max_age": 9, "age_bound": 2}
    (run / "summary.json").write_text(json.dumps(summary))
    assert (await fetch(run))["verdict"][2]["state"] == "no"
    (run / "summary.json").write_text(json.dumps({**summary, "steps": 4}))
    assert (await fetch(run))["verdict"][2]["state"] == "check"


async def test_settings_that_differ_come_with_their_defaults(run: Path) -> None:
    found = await fetch(run)
    changed = {setting["key"]: (setting["value"], setting["default"]) for setting in found["changed_settings"]}
    assert changed["rollout.max_concurrency"] == (7, 64)
    assert not {"name", "max_staleness"} & changed.keys()
    assert found["settings"]["max_staleness"] == 2


async def test_a_live_run_has_its_remaining_time_until_it_is_silent(run: Path) -> None:
    with RunFolder(run).locked():
        silent = (await fetch(run))["progress"]
    assert silent["left_s"] is None and silent["silent_s"] > 1e6, "its newest step is of 2023"
    columns = StepColumns(run)
    columns.read_new_rows()
    active = measure_progress(columns, 20, STARTED_S + 11)
    assert (active["left_s"], active["silent_s"]) == (pytest.approx(10.0), None)
    assert "20% of its time" in active["waits"]


async def test_the_advice_is_that_of_why(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JsonLines(run / "timeline" / "rollout-0.jsonl") as file:
        for seq in range(8):
            times = {"start_s": STARTED_S + seq + 0.1, "end_s": STARTED_S + seq + 1.2}
            file.write({"role": "rollout-0", "track": "generation", "name": f"group {seq}", **times})
    found = await fetch(run, "/advice")
    assert found["cause"] and found["advice"].endswith(".") and 0 < found["share"] <= 1

    monkeypatch.setattr(overview, "MAX_EXPLAINED_BYTES", 10)
    assert "async-grpo why" in (await fetch(run, "/advice"))["note"]


async def test_a_run_that_cannot_be_explained_has_no_advice(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "bare"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: bare\nsteps: 10\n")
    write_metrics(run, range(1, 3))
    assert await fetch(run, "/advice") == {"note": ""}
