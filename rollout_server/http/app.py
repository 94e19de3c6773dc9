"""The HTTP application: all routes behind the host check, with the probes and the administration.

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
from rollout_server.dispatch.admission import AdmissionGate
from rollout_server.http.completions import completion_routes
from rollout_server.http.context import HttpContext
from rollout_server.http.metrics import metrics_routes
from rollout_server.http.streaming import HttpError


def admin_routes(http: HttpContext) -> APIRouter:
    """The routes of /admin. All need the administration token."""

    async def token(request: Request) -> None:
        http.keys.admit_to_admin(request.headers.get("authorization", ""))

    routes = APIRouter(prefix="/admin", dependencies=[Depends(token)])

    @routes.post("/pause")
    async def pause() -> JSONResponse:
        """Admit nothing new; what is in flight goes on, and so do completions over HTTP."""
        admission().pause()
        return _state(http)

    @routes.post("/resume")
    async def resume() -> JSONResponse:
        """Admit again."""
        admission().resume()
        return _state(http)

    @routes.post("/drain")
    async def drain(now: bool = False) -> JSONResponse:
        """Admit nothing new, finish what is in flight (`now`: store it and give it back), and leave the run."""
        admission().drain(now=now)
        return _state(http)

    def admission() -> AdmissionGate:
        return http.open().dispatcher.admission

    return routes


def _state(http: HttpContext) -> JSONResponse:
    dispatcher = http.open().dispatcher
    return JSONResponse({"admission": dispatcher.admission.state.value, "groups_in_work": len(dispatcher.groups)}, 202)


def probe_routes(http: HttpContext) -> APIRouter:
    """The routes /healthz and /readyz. They need no key and show no text of prompts or completions."""
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> JSONResponse:
        """Always 200: an answer means that the process lives and its event loop runs."""
        return JSONResponse({"status": "alive", "server": http.name})

    @routes.get("/readyz")
    async def readyz() -> JSONResponse:
        """200 once the engine has its first weights and while the server is not about to leave, else 503."""
        if reason := http.why_not_ready:
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        server = http.ready()
        admission = server.dispatcher.admission.state.value
        return JSONResponse({"status": "ready", "policy_version": server.policy, "admission": admission})

    return routes


def make_app(http: HttpContext) -> ASGIApp:
    """The application without its socket. No documentation pages and no CORS: it serves no web pages."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for routes in (probe_routes(http), metrics_routes(http), completion_routes(http), admin_routes(http)):
        app.include_router(routes)
    app.add_exception_handler(HttpError, _explain)
    app.add_exception_handler(HTTPException, _explain_unknown)
    local_only = http.config.rollout.http.is_local and not http.keys.completions
    refusal = HttpError(403, "this server answers to localhost only. Use its address from the log").response()
    return ResponseCounter(LocalNamesOnly(app, refusal) if local_only else app, http.responses)


class ResponseCounter:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, responses: Counter[tuple[str, int]]) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses[getattr(scope.get("route"), "path", "other"), message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


async def _explain(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error.response()


async def _explain_unknown(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return HttpError(error.status_code, str(error.detail), headers=error.headers).response()
