"""/healthz and /readyz, for whoever keeps the server alive and sends it requests."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse

from rollout_server.http.lobby import Lobby


def probe_routes(lobby: Lobby) -> APIRouter:
    """They need no key and tell no text."""
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> JSONResponse:
        """That this is answered says it all: the process lives and its event loop turns."""
        return JSONResponse({"status": "alive", "server": lobby.name})

    @routes.get("/readyz")
    async def readyz() -> JSONResponse:
        """Ready: the engine has started, has its first weights, and the server is not about to leave."""
        if reason := lobby.why_not_ready:
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        backstage = lobby.ready()
        admission = backstage.dispatcher.admission.state.value
        return JSONResponse({"status": "ready", "policy_version": backstage.policy, "admission": admission})

    return routes
