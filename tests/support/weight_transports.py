"""The transports of weights that contract tests go through, and what each needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from async_grpo.config import RunConfig, validate
from tests.support.s3_server import s3_server

Place = Callable[[], AbstractContextManager[dict[str, Any]]]
"""Makes what a transport needs; yields its keys of `weights`."""


@contextmanager
def _in_a_folder() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield {"location": folder}


@contextmanager
def _in_a_bucket() -> Iterator[dict[str, Any]]:
    with s3_server() as url:
        yield {"location": f"{url}/runs"}


ONE_SLOT: dict[str, Any] = {"receiver_slots": 1, "request_timeout_s": 1.0}
"""What the tests do not take is overwritten after a second."""


@contextmanager
def _in_a_folder_and_one_slot() -> Iterator[dict[str, Any]]:
    with _in_a_folder() as keys:
        yield {**keys, **ONE_SLOT, "transport": "shared_filesystem"}


PLACES: dict[str, Place] = {
    "zmq": lambda: nullcontext({}),
    "zmq, three connections": lambda: nullcontext({"connections": 3, "transport": "zmq"}),
    "zmq, one slot": lambda: nullcontext({**ONE_SLOT, "transport": "zmq"}),
    "shared_filesystem": _in_a_folder,
    "shared_filesystem, one slot": _in_a_folder_and_one_slot,
    "object_store": _in_a_bucket,
}


@contextmanager
def made_place(transport: str) -> Iterator[dict[str, Any]]:
    """Keys of `weights` for small models and impatient tests."""
    with PLACES[transport]() as keys:
        yield {"transport": transport, "chunk_bytes": 8192, "heartbeat_s": 0.2, **keys}


def config_of(name: str, weights: dict[str, Any]) -> RunConfig:
    """A run with nothing but a transport."""
    raw = {"name": f"{name}-{os.getpid()}", "runs_dir": "/tmp", "model": {"random": {}}, "weights": weights}
    return validate(raw, "test")
