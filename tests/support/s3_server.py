"""moto's server: buckets of Amazon S3, in memory, over HTTP.

It checks no signatures, has no bandwidth limit, no throttling and no eventual failures.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

STARTS_S = 60.0
SECRET = "a-secret-of-the-test"


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket; the environment names the server. Skips where moto or obstore is not installed."""
    pytest.importorskip("moto", reason="pip install 'moto[server]'")
    pytest.importorskip("obstore", reason="pip install obstore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            patch.setenv("AWS_REGION", "us-east-1")
            patch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
            make_bucket(port, "weights")
            yield "s3://weights"
    finally:
        server.kill()
        server.wait()


def make_bucket(port: int, name: str) -> None:
    """As soon as the server answers."""
    deadline = time.monotonic() + STARTS_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTS_S)
        try:
            connection.request("PUT", f"/{name}")
            assert connection.getresponse().status == 200
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "moto's server did not start"
            time.sleep(0.05)
        finally:
            connection.close()
