"""The page's server: which runs it shows, to whom, with which headers, and news of a run that is being written."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from async_grpo.errors import ConfigError
from async_grpo.lab.view import server
from async_grpo.lab.view.catalog import RunsRoot
from async_grpo.lab.view.server import make_app, stream_run_events


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for name in ("one", "<script>alert(1)</script>".replace("/", "∕")):
        (root / name).mkdir(parents=True)
        (root / name / "config.yaml").write_text("name: x\n")
    (root / "no-run").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.yaml").write_text("name: secret\n")
    (root / "link").symlink_to(tmp_path / "secret")
    return root


async def ask(root: Path, path: str, host: str = "127.0.0.1:1") -> httpx.Response:
    transport = httpx.ASGITransport(make_app(RunsRoot(root), asyncio.Event()))
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=5) as client:
        return await client.get(path, headers={"host": host})


async def test_folders_of_runs_are_listed_and_links_are_not(runs: Path) -> None:
    names = [run["name"] for run in (await ask(runs, "/api/runs")).json()]
    assert names == ["<script>alert(1)<∕script>", "one"]
    assert [run["name"] for run in (await ask(runs / "one", "/api/runs")).json()] == ["one"]


@pytest.mark.parametrize(
    "name",
    ["two", "no-run", "link", "..", "%2e%2e", "..%2fsecret", "%2Fetc", "one%00", "..%2f..%2fetc", "%2e%2e%2fsecret"],
)
@pytest.mark.parametrize("what", ["samples", "timeline", "events"])
async def test_no_path_outside_the_folder_is_served(runs: Path, name: str, what: str) -> None:
    assert (await ask(runs, f"/api/runs/{name}/{what}")).status_code == 404


async def test_page_files_have_a_policy_without_inline_scripts(runs: Path) -> None:
    page, script = await ask(runs, "/"), await ask(runs, "/static/app.js")
    assert "<script src=" in page.text and "<script>" not in page.text
    for answer in (page, script, await ask(runs, "/api/runs/none/samples")):
        assert "script-src 'self';" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
    assert (await ask(runs, "/static/..%2fserver.py")).status_code == 404


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:80", 200), ("[::1]:80", 200), ("evil.example", 403), ("", 403)]
)
async def test_hosts_other_than_this_machine_are_rejected(runs: Path, host: str, status: int) -> None:
    assert (await ask(runs, "/", host)).status_code == status


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_page_on_loopback_rejects_other_hosts(runs: Path, host: str) -> None:
    command = "from async_grpo.app.cli.main import app; app()"
    argv = [sys.executable, "-c", command, "view", str(runs), "--host", host, "--port", "0", "--no-open"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the command printed no address"
            assert httpx.get(found[0], timeout=20).status_code == 200
            assert httpx.get(found[0], headers={"host": "evil.example"}, timeout=20).status_code == 403
        finally:
            process.terminate()


async def test_wrong_parameters_are_reported(runs: Path) -> None:
    for query in ("q=(&regex=true", "sort=best", "limit=9999", "unheard=1"):
        assert (await ask(runs, f"/api/runs/one/samples?{query}")).status_code == 422, query
    assert (await ask(runs, "/api/runs/one/samples/rollout-0.jsonl@0")).status_code == 404


async def test_a_new_row_causes_an_event(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "POLL_S", 0.01)
    ending = asyncio.Event()
    stream = stream_run_events(runs / "one", ending)
    assert await anext(stream) == "retry: 2000\n\n"
    waiting = asyncio.ensure_future(anext(stream))
    (runs / "one" / "metrics.jsonl").write_text("{}\n")
    assert await asyncio.wait_for(waiting, 5) == 'event: rows\ndata: ["metrics.jsonl"]\n\n'
    ending.set()
    assert [event async for event in stream] == []


def test_the_error_for_a_wrong_folder_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/none .*runs_dir"):
        RunsRoot(tmp_path / "none")
