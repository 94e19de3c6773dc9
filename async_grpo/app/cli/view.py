"""`async-grpo view`: a local web page of runs."""

from __future__ import annotations

import asyncio
import socket
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from async_grpo.app.cli.common import exit_with_code
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.utils.addresses import is_loopback
from async_grpo.utils.aio import stop_signals

if TYPE_CHECKING:
    from async_grpo.utils.http_server import HttpServer

MAX_REQUESTS = 64


@exit_with_code()
def view(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Folder of runs, or of one run.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free port.")] = 8765,
    host: Annotated[str, typer.Option(help="Address to listen on. On any but the loopback, everybody may read.")] = (
        "127.0.0.1"
    ),
    localhost_only: Annotated[
        bool,
        typer.Option(
            "--localhost-only",
            help="Accept only requests to localhost, for any --host. Use it for a published port of a container.",
        ),
    ] = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Show runs in a browser: curves, staleness, timeline and samples, with live updates.

    The page is read-only, loads nothing from other hosts and needs no network. Ctrl-C stops the server.
    """
    _serve_page(runs, port, host, localhost_only, open_page)


def _serve_page(runs: Path, port: int, host: str, localhost_only: bool, open_page: bool) -> None:
    try:
        from async_grpo.lab.view.catalog import RunsRoot
        from async_grpo.lab.view.server import make_app
        from async_grpo.utils.http_server import HttpServer, address_of, listen
    except ImportError as error:
        raise DependencyError(f"the page needs FastAPI and uvicorn ({error}): pip install async-grpo[http]") from error
    ending = asyncio.Event()
    app = make_app(RunsRoot(runs), ending, local_only=localhost_only or is_loopback(host))
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port} ({error}). Choose another --port") from error
    address = address_of(*listener.getsockname()[:2])
    typer.echo(f"{runs} at {address} (Ctrl-C stops the server)")
    if open_page:
        webbrowser.open(address)
    asyncio.run(serve(HttpServer(app, MAX_REQUESTS), listener, ending))


async def serve(server: HttpServer, listener: socket.socket, ending: asyncio.Event) -> None:
    """Serve until SIGINT or SIGTERM."""

    def stop() -> None:
        ending.set()  # first: the server waits for open event streams
        server.stop()

    with stop_signals(stop):
        await server.serve(listener)
