"""The server that a bench of the state plane works on: a private one of its own, or a given one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from async_grpo.config.buffer import RedisConfig
from buffer import PASSWORD_VARIABLE, EmbeddedServer

Fsync = Literal["everysec", "always"]

PATIENCE_S = 5.0
"""For a given server that does not answer."""


@contextlib.contextmanager
def bench_server(url: str | None, fsync: Fsync = "always") -> Iterator[RedisConfig]:
    """The configuration that reaches it. The embedded one is that of a run (append-only file included), except
    for `fsync`, and is gone afterwards. Call it in the main thread: the server dies with its starter."""
    if url is not None:
        yield RedisConfig(url=url, timeout_s=PATIENCE_S, durable=False)
        return
    os.environ.pop(PASSWORD_VARIABLE, None)  # it is another server's; ours has none and would refuse it
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        server = EmbeddedServer(Path(folder) / "server", RedisConfig(fsync=fsync))
        try:
            yield RedisConfig(url=server.start())
        finally:
            server.stop()
