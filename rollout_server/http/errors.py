"""What goes wrong for one request, in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

REFUSED, BUSY, BROKEN = "invalid_request_error", "rate_limit_error", "server_error"


class HttpError(Exception):
    """One request fails; the server goes on. The message says what, why and how to mend it."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """{"error": {...}}, as OpenAI's API has it."""
        kind = BUSY if self.status == 429 else BROKEN if self.status >= 500 else REFUSED
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def not_ready(reason: str) -> HttpError:
    """The server cannot do that at this moment."""
    return HttpError(503, f"not ready: {reason}. Ask again later", code="not_ready", headers={"retry-after": "1"})
