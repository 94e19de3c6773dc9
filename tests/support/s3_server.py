"""moto's server: buckets of Amazon S3, in memory, over HTTP.

It checks no signatures, has no bandwidth limit, no throttling and no eventual failures.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

SECRET = "a-secret-of-the-test"


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket; the environment names the server. Skips where moto or obstore is not installed."""
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    pytest.importorskip("obstore", reason="pip install obstore")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs every request
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url, bucket = f"http://{host}:{port}", f"bucket-{uuid.uuid4().hex}"  # servers of one process share their buckets
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", url)
            patch.setenv("AWS_REGION", "us-east-1")
            patch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
            httpx.put(f"{url}/{bucket}").raise_for_status()
            yield f"s3://{bucket}"
    finally:
        server.stop()
