"""The HTTP application: all routes behind the host check; defines probes and administration.

    request --> ResponseCounter --> LocalNamesOnly --> route --> answer, or {"error": ...} with a status

- /healthz, /readyz: for supervisors and load balancers
- /admin/*: pause and resume the admission of groups, or drain the server
- /metrics, /v1/*: see `metrics` and `completions`
"""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_grpo.utils.http_server import LocalNamesOnly
from rollout_server.http.completions import completion_routes
from rollout_server.http.context import HttpContext
from rollout_server.http.metrics import metrics_routes
from rollout_server.http.streaming import HttpError


def admin_routes(http: HttpContext) -> APIRouter:
    """Routes of /admin. All need the administration token."""

    async def check_token(request: Request) -> None:
        http.keys.check_admin_token(request.headers.get("authorization", ""))

    routes = APIRouter(prefix="/admin", dependencies=[Depends(check_token)])

    @routes.post("/pause")
    async def pause() -> JSONResponse:
        """Start no new groups. Groups in flight and completions over HTTP continue."""
        http.require_server().dispatcher.admission.pause()
        return _admission_response(http)

    @routes.post("/resume")
    async def resume() -> JSONResponse:
        """Start groups again."""
        http.require_server().dispatcher.admission.resume()
        return _admission_response(http)

    @routes.post("/drain")
    async def drain(now: bool = False) -> JSONResponse:
        """Start no new groups, finish those in flight (`now`: save them and give them back), and leave the run."""
        http.require_server().dispatcher.admission.drain(now=now)
        return _admission_response(http)

    return routes


def _admission_response(http: HttpContext) -> JSONResponse:
    dispatcher = http.require_server().dispatcher
    return JSONResponse({"admission": dispatcher.admission.state.value, "groups_in_work": len(dispatcher.groups)}, 202)


def probe_routes(http: HttpContext) -> APIRouter:
    """Routes /healthz and /readyz. They need no key and show no text of prompts or completions."""
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> JSONResponse:
        """Always 200: a response means that the process is alive and its event loop is not blocked."""
        return JSONResponse({"status": "alive", "server": http.name})

    @routes.get("/readyz")
    async def readyz() -> JSONResponse:
        """200 from the first weights until the server leaves the run, otherwise 503."""
        reason = http.not_ready_reason
        if reason is not None:
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        server = http.require_ready()
        admission = server.dispatcher.admission.state.value
        return JSONResponse({"status": "ready", "policy_version": server.policy_version, "admission": admission})

    return routes


def make_app(http: HttpContext) -> ASGIApp:
    """Make the application without its socket. No documentation pages and no CORS: it serves no web pages."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for routes in (probe_routes(http), metrics_routes(http), completion_routes(http), admin_routes(http)):
        app.include_router(routes)
    app.add_exception_handler(HttpError, _respond_to_error)
    app.add_exception_handler(HTTPException, _respond_to_framework_error)

    # Without a key, a web page that rebinds its own host name to 127.0.0.1 could use the server from a browser here.
    is_local_only = http.config.rollout.http.is_local and not http.keys.completions
    if not is_local_only:
        return ResponseCounter(app, http.responses)
    refusal = HttpError(403, "this server answers to localhost only. Use its address from the log").response()
    return ResponseCounter(LocalNamesOnly(app, refusal), http.responses)


class ResponseCounter:
    """Counts responses by route and status."""

    def __init__(self, app: ASGIApp, responses: Counter[tuple[str, int]]) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request and count its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                # By the route's pattern: a label per requested path would let clients create any number of them.
                route = getattr(scope.get("route"), "path", "other")
                self._responses[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, count_and_send)


async def _respond_to_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error.response()


async def _respond_to_framework_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return HttpError(error.status_code, str(error.detail), headers=error.headers).response()
