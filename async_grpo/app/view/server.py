"""The page of runs as an application: its files, what runs hold as JSON, and news of runs that are being written.

    request --> LocalNamesOnly --> PageHeaders --> /            the page (static/)
                                                   /api/runs    runs; /NAME/samples, /NAME/timeline; /NAME/events

It only reads. The page may load nothing from elsewhere, and no script but its own files (Content-Security-Policy).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_grpo.app.view.sample_search import sample_routes
from async_grpo.app.view.timeline import timeline_routes
from async_grpo.errors import ConfigError
from async_grpo.utils.http_server import LocalNamesOnly

STATIC = Path(__file__).parent / "static"
LOOK_S = 0.5
"""Seconds between two looks at the files of a run that a page follows."""
QUIET_LOOKS = 30
"""Looks without news after which the connection is shown to be alive."""
WRITTEN = ("metrics.jsonl", "trained.jsonl", "samples/*.jsonl", "timeline/*.jsonl", "run.json", "summary.json")
"""Files whose growth is news."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class RunsRoot:
    """The runs below a folder, or the one run that the folder is."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(
                f"{path} is no folder of runs. Name the folder that holds them (runs_dir of the configuration, usually "
                "runs), or one run in it"
            )
        self._path = path.resolve()

    def runs(self) -> dict[str, Path]:
        """Name and folder of each run."""
        folders = [self._path] if is_run(self._path) else sorted(self._path.iterdir())
        return {folder.name: folder for folder in folders if is_run(folder) and not folder.is_symlink()}

    def find(self, name: str) -> Path:
        """The folder of a run. Raises HTTPException if there is none of this name."""
        path = self._path if is_run(self._path) and name == self._path.name else self._path / name
        inside = path == self._path or (path.parent == self._path and not path.is_symlink())
        if name in ("", ".", "..") or "/" in name or "\0" in name or not inside or not is_run(path):
            raise HTTPException(404, f"there is no run {name!r} in {self._path}")
        return path


def is_run(folder: Path) -> bool:
    """Whether the folder is that of a run."""
    return (folder / "config.yaml").is_file() or (folder / "metrics.jsonl").is_file()


def make_app(root: RunsRoot, ending: asyncio.Event, *, local_only: bool = True) -> ASGIApp:
    """The application without its socket. `ending` ends the news that pages follow. `local_only`: answer requests for
    this machine's own names alone."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def page() -> FileResponse:
        """The page."""
        return FileResponse(STATIC / "index.html")

    @app.get("/api/runs")
    def runs() -> list[dict[str, Any]]:
        """The runs, by name."""
        return [{"name": name, "changed_s": path.stat().st_mtime} for name, path in root.runs().items()]

    @app.get("/api/runs/{name}/events")
    async def events(name: str) -> StreamingResponse:
        """Server-sent: an event `rows` with the names of the files that have grown."""
        return StreamingResponse(news_of(root.find(name), ending), media_type="text/event-stream")

    app.include_router(sample_routes(root.find))
    app.include_router(timeline_routes(root.find))
    app.mount("/static", StaticFiles(directory=STATIC))
    page_app = PageHeaders(app)
    return LocalNamesOnly(page_app) if local_only else page_app


class PageHeaders:
    """Adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


async def news_of(run_dir: Path, ending: asyncio.Event) -> AsyncIterator[str]:
    """Server-sent events about the files of a run, until `ending` is set."""
    known, quiet = await asyncio.to_thread(sizes_of, run_dir), 0
    yield "retry: 2000\n\n"
    while not ending.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), LOOK_S)
        now = await asyncio.to_thread(sizes_of, run_dir)
        changed = sorted(name for name in now if now[name] != known.get(name))
        known, quiet = now, 0 if changed else quiet + 1
        if changed:
            yield f"event: rows\ndata: {json.dumps(changed)}\n\n"
        elif quiet % QUIET_LOOKS == 0:
            yield ": quiet\n\n"


def sizes_of(run_dir: Path) -> dict[str, int]:
    """Size of each file that is written while a run goes on."""
    found = [path for pattern in WRITTEN for path in run_dir.glob(pattern)]
    return {str(path.relative_to(run_dir)): path.stat().st_size for path in found}
