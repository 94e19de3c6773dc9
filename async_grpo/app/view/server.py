"""The web application of `async-grpo view`: the page's files, the data of runs as JSON, and events of live runs.

    request --> LocalNamesOnly --> PageHeaders --> /            the page (static/)
                                                   /api/        runs, curves, sweeps, samples, timelines, changes
                                                   /reports/    reports for a frame

It only reads. The Content-Security-Policy lets the page load nothing from other hosts, and no scripts but its own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_grpo.app.view.catalog import RunsRoot
from async_grpo.app.view.news import news_of, news_of_runs
from async_grpo.app.view.run_pages import curve_routes, report_routes, run_routes
from async_grpo.app.view.sample_search import sample_routes
from async_grpo.app.view.timeline import timeline_routes
from async_grpo.utils.http_server import LocalNamesOnly

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
        return StreamingResponse(news_of(root.find(name), ending), media_type="text/event-stream")

    @app.get("/api/changes")
    async def changes() -> StreamingResponse:
        """Server-sent: an event `runs` with the ids of the runs that have changed, come or gone."""
        return StreamingResponse(news_of_runs(root, ending), media_type="text/event-stream")

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
