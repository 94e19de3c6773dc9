"""/admin: take no more groups, take them again, leave the run."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse

from rollout_server.admission import Admission
from rollout_server.http.lobby import Lobby


def admin_routes(lobby: Lobby) -> APIRouter:
    """All of them need the administration token."""

    async def token(request: Request) -> None:
        lobby.keys.admit_to_admin(request.headers.get("authorization", ""))

    routes = APIRouter(prefix="/admin", dependencies=[Depends(token)])

    @routes.post("/pause")
    async def pause() -> JSONResponse:
        """Admit nothing new; what is in flight goes on, and so do completions over HTTP."""
        admission().pause()
        return _state(lobby)

    @routes.post("/resume")
    async def resume() -> JSONResponse:
        """Admit again."""
        admission().resume()
        return _state(lobby)

    @routes.post("/drain")
    async def drain(now: bool = False) -> JSONResponse:
        """Admit nothing new, finish what is in flight (`now`: store it and give it back), and leave the run."""
        admission().drain(now=now)
        return _state(lobby)

    def admission() -> Admission:
        return lobby.open().dispatcher.admission

    return routes


def _state(lobby: Lobby) -> JSONResponse:
    dispatcher = lobby.open().dispatcher
    return JSONResponse({"admission": dispatcher.admission.state.value, "groups_in_work": len(dispatcher.leases)}, 202)
