"""What answers over HTTP has in common, whoever answers: a socket, and uvicorn behind it."""

from async_grpo.http.server import HttpServer
from async_grpo.http.sockets import address_of, listen

__all__ = ["HttpServer", "address_of", "listen"]
