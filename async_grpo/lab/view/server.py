"""The web application of `async-grpo view`: the page's files, the data of runs as JSON, and events of live runs.

    request --> LocalNamesOnly --> PageHeaders --> /            the page (static/)
                                                   /api/        runs, curves, sweeps, samples, timelines, changes
                                                   /reports/    reports for a frame

A page subscribes to the events of a run or of all runs (/api/runs/ID/events, /api/changes), and fetches its data again
when an event names them. The files are polled every POLL_S seconds.

It only reads. The Content-Security-Policy lets the page load nothing from other hosts, and no scripts but its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.lab.view.catalog import RunsRoot
from async_grpo.lab.view.run_pages import curve_routes, report_routes, run_routes
from async_grpo.lab.view.sample_search import sample_routes
from async_grpo.lab.view.timeline import timeline_routes
from async_grpo.utils.http_server import LocalNamesOnly

POLL_S = 0.5
"""Seconds between two polls of the files."""
KEEPALIVE_POLLS = 30
"""Polls without a change after which a comment is sent, so that proxies keep the connection open."""
WRITTEN = (
    *("metrics.jsonl", "trained.jsonl", "samples/*.jsonl", "timeline/*.jsonl", "evaluations/*.jsonl", "logs/*.log"),
    *("run.json", "summary.json", "report.md"),
)
"""Files whose growth is reported."""
STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "frame-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app(root: RunsRoot, ending: asyncio.Event, *, local_only: bool = True) -> ASGIApp:
    """The ASGI application. Setting `ending` ends the event streams. `local_only`: refuse requests whose Host header
    does not name this machine."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def page() -> FileResponse:
        """The page."""
        return FileResponse(STATIC / "index.html")

    @app.get("/api/runs/{name}/events")
    async def events(name: str) -> StreamingResponse:
        """Server-sent: an event `rows` with the names of the files that have grown."""
        return StreamingResponse(run_events(root.find(name), ending), media_type="text/event-stream")

    @app.get("/api/changes")
    async def changes() -> StreamingResponse:
        """Server-sent: an event `runs` with the ids of the runs that have changed, come or gone."""
        return StreamingResponse(list_events(root, ending), media_type="text/event-stream")

    for routes in (run_routes, curve_routes, report_routes):
        app.include_router(routes(root))
    app.include_router(sample_routes(root.find))
    app.include_router(timeline_routes(root.find))
    app.mount("/static", StaticFiles(directory=STATIC))
    page_app = PageHeaders(app)
    return LocalNamesOnly(page_app) if local_only else page_app


class PageHeaders:
    """Adds HEADERS to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def run_events(run_dir: Path, ending: asyncio.Event) -> AsyncIterator[str]:
    """Events `rows` with the names of the run's files that have grown, and `run.lock` when it began or ended."""
    return _changes("rows", lambda: _sizes(run_dir), ending)


def list_events(root: RunsRoot, ending: asyncio.Event) -> AsyncIterator[str]:
    """Events `runs` with the ids of the runs that have changed, come or gone."""
    return _changes("runs", lambda: {run.id: run.sign() for run in root.runs()}, ending)


async def _changes(event: str, poll: Callable[[], Mapping[str, Any]], ending: asyncio.Event) -> AsyncIterator[str]:
    """An event whenever two successive polls differ, until `ending` is set. `poll` returns the state by name."""
    known, quiet = await asyncio.to_thread(poll), 0
    yield "retry: 2000\n\n"
    while not ending.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), POLL_S)
        now = await asyncio.to_thread(poll)
        changed = sorted(name for name in now.keys() | known.keys() if now.get(name) != known.get(name))
        known, quiet = now, 0 if changed else quiet + 1
        if changed:
            yield f"event: {event}\ndata: {json.dumps(changed)}\n\n"
        elif quiet % KEEPALIVE_POLLS == 0:
            yield ": quiet\n\n"


def _sizes(run_dir: Path) -> dict[str, int]:
    """Size of each file that a live run writes, and 1 for `run.lock` while it is held, else 0."""
    found = [path for pattern in WRITTEN for path in run_dir.glob(pattern)]
    sizes = {str(path.relative_to(run_dir)): path.stat().st_size for path in found}
    return {**sizes, "run.lock": int(RunFolder(run_dir).has_live_process())}
