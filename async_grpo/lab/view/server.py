"""The web application of `async-grpo view`: the page's files, the data of runs as JSON, and events of live runs.

    request --> LocalNamesOnly --> PageHeaders --> /            the page (static/)
                                                   /api/        runs, curves, sweeps, samples, timelines, changes
                                                   /reports/    reports for a frame

The page subscribes to the events of a run or of all runs (/api/runs/ID/events, /api/changes) and fetches its data again
when an event names it. The files are polled every POLL_S seconds.

The application is read-only. Its Content-Security-Policy keeps the page from loading anything from other hosts, and
from running scripts other than its own.
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
WATCHED_FILES = (
    "metrics.jsonl",
    "trained.jsonl",
    "samples/*.jsonl",
    "timeline/*.jsonl",
    "evaluations/*.jsonl",
    "logs/*.log",
    "run.json",
    "summary.json",
    "report.md",
)
"""Files whose growth causes an event."""
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
    """Return the ASGI application. Setting `ending` ends the event streams.

    With `local_only`, requests whose Host header does not name this machine are refused. Otherwise another web site
    could read the page through DNS rebinding.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def page() -> FileResponse:
        """Return the page."""
        return FileResponse(STATIC / "index.html")

    @app.get("/api/runs/{name}/events")
    async def events(name: str) -> StreamingResponse:
        """Stream an event `rows` with the names of the files that have grown (server-sent events)."""
        return StreamingResponse(stream_run_events(root.find_run_folder(name), ending), media_type="text/event-stream")

    @app.get("/api/changes")
    async def changes() -> StreamingResponse:
        """Stream an event `runs` with the ids of the runs that were changed, added or removed."""
        return StreamingResponse(stream_list_events(root, ending), media_type="text/event-stream")

    for routes in (run_routes, curve_routes, report_routes):
        app.include_router(routes(root))
    app.include_router(sample_routes(root.find_run_folder))
    app.include_router(timeline_routes(root.find_run_folder))
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


def stream_run_events(run_dir: Path, ending: asyncio.Event) -> AsyncIterator[str]:
    """Yield events `rows` with the names of the run's files that have grown; `run.lock` when it starts or ends."""
    return _stream_changes("rows", lambda: _file_sizes(run_dir), ending)


def stream_list_events(root: RunsRoot, ending: asyncio.Event) -> AsyncIterator[str]:
    """Yield events `runs` with the ids of the runs that were changed, added or removed."""
    return _stream_changes("runs", lambda: {run.id: run.fingerprint() for run in root.viewed_runs()}, ending)


async def _stream_changes(
    event: str, poll: Callable[[], Mapping[str, Any]], ending: asyncio.Event
) -> AsyncIterator[str]:
    """Yield an event whenever two successive polls differ, until `ending` is set. `poll` returns the state by name."""
    previous = await asyncio.to_thread(poll)
    quiet_polls = 0
    yield "retry: 2000\n\n"
    while not ending.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), POLL_S)
        current = await asyncio.to_thread(poll)
        names = current.keys() | previous.keys()
        changed = sorted(name for name in names if current.get(name) != previous.get(name))
        previous = current

        if changed:
            quiet_polls = 0
            yield f"event: {event}\ndata: {json.dumps(changed)}\n\n"
        else:
            quiet_polls += 1
            if quiet_polls % KEEPALIVE_POLLS == 0:
                yield ": quiet\n\n"


def _file_sizes(run_dir: Path) -> dict[str, int]:
    """Return the size of each file that a live run writes, and for `run.lock` 1 if the run is live, otherwise 0."""
    sizes = {}
    for pattern in WATCHED_FILES:
        for path in run_dir.glob(pattern):
            sizes[str(path.relative_to(run_dir))] = path.stat().st_size
    sizes["run.lock"] = int(RunFolder(run_dir).has_live_process())
    return sizes
