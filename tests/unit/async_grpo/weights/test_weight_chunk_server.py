"""Serving chunks of versions that are whole, growing, or gone; no sockets."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from async_grpo.weights.chunks import ServedVersion, cut_into_chunks, pack_hashes
from async_grpo.weights.manifest import WeightManifest, WeightVersion, make_layout
from async_grpo.weights.zmq.chunk_server import ChunkServer
from async_grpo.weights.zmq.messages import (
    ChunkAnswer,
    ChunkPending,
    ChunkReply,
    ChunkRequest,
    FetchDone,
    VersionGone,
    sign,
)
from async_grpo.wire import encode

KEY = b"k" * 16
V1, V2, V3 = (WeightVersion(0, version) for version in (1, 2, 3))


class Router:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any, bytes]] = []

    def send_multipart(self, frames: list[Any], **_: Any) -> None:
        self.sent.append((frames[0], msgspec.msgpack.decode(frames[1], type=ChunkAnswer), b"".join(frames[2:])))


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def server(router: Router, now: list[float]) -> ChunkServer:
    return ChunkServer(cast(Any, router), lambda: now[0], idle_s=5.0, max_fetch_s=60.0)


def served(identity: WeightVersion, *, arriving: bool = False) -> ServedVersion:
    block = memoryview(bytearray(b"a" * 64 + b"b" * 64))
    layout = make_layout([("a", "bfloat16", [64])])
    manifest = WeightManifest(
        **identity._asdict(), layout=layout, chunk_bytes=64, hashes=pack_hashes([0, 0]), key=KEY, base=None
    )
    make = ServedVersion.from_manifest if arriving else ServedVersion.from_block
    version = make(manifest, cut_into_chunks(layout, 64), block)
    version.add_patch(1, b"patch")
    return version


def ask(server: ChunkServer, identity: WeightVersion, index: int, *, patch: bool = False, key: bytes = KEY) -> None:
    signature = sign(key, identity, index, patch)
    request = ChunkRequest(
        epoch=identity.epoch, version=identity.version, index=index, patch=patch, signature=signature
    )
    server.handle_message([b"peer", encode(request)])


def test_a_chunk_is_served_dense_or_as_a_patch_if_that_is_asked_for_and_there(
    server: ChunkServer, router: Router
) -> None:
    server.offer_version(served(V1))
    ask(server, V1, 1)
    ask(server, V1, 1, patch=True)
    ask(server, V1, 0, patch=True)
    assert [(reply, data) for _, reply, data in router.sent] == [
        (ChunkReply(epoch=0, version=1, index=1, patch=False), b"b" * 64),
        (ChunkReply(epoch=0, version=1, index=1, patch=True), b"patch"),
        (ChunkReply(epoch=0, version=1, index=0, patch=False), b"a" * 64),
    ]
    assert (server.served_bytes, server.served_chunks, server.served_patches) == (133, 2, 1)


def test_a_request_without_the_versions_key_gets_no_answer(server: ChunkServer, router: Router) -> None:
    server.offer_version(served(V1))
    ask(server, V1, 0, key=b"x" * 16)
    server.handle_message([b"peer", b"rubbish"])
    ask(server, V1, 2)
    other = ChunkRequest(epoch=0, version=1, index=1, patch=False, signature=sign(KEY, V1, 0, False))
    server.handle_message([b"peer", encode(other)])
    assert (router.sent, server.unsigned) == ([], 3)


def test_a_chunk_that_has_not_arrived_is_served_when_it_has(server: ChunkServer, router: Router) -> None:
    growing = served(V1, arriving=True)
    server.offer_version(growing)
    ask(server, V1, 0)
    ask(server, V1, 0)
    assert router.sent == []
    growing.mark_chunk_verified(0)
    server.answer_waiting(V1, 0)
    server.answer_waiting(V1, 0)
    assert [reply.index for _, reply, _ in router.sent] == [0]


def test_a_version_that_is_not_here_yet_is_waited_for_and_checked_when_it_comes(
    server: ChunkServer, router: Router
) -> None:
    ask(server, V2, 0)
    ask(server, V2, 1, key=b"x" * 16)
    server.offer_version(served(V1))
    assert router.sent == []
    server.offer_version(served(V2))
    assert [reply.index for _, reply, _ in router.sent] == [0]


def test_only_waiters_are_notified_of_a_returned_server(server: ChunkServer, router: Router) -> None:
    server.send_pending()
    assert router.sent == []
    ask(server, V1, 0)
    ask(server, V1, 1)
    server.send_pending()
    assert [reply for _, reply, _ in router.sent] == [ChunkPending()]


def test_an_older_version_and_one_that_was_passed_over_are_gone(server: ChunkServer, router: Router) -> None:
    ask(server, V2, 0)
    server.offer_version(served(V3))
    ask(server, V1, 0)
    assert [reply for _, reply, _ in router.sent] == [VersionGone(epoch=0, version=2), VersionGone(epoch=0, version=1)]


def test_waiters_for_an_abandoned_version_are_notified(server: ChunkServer, router: Router) -> None:
    server.offer_version(served(V1, arriving=True))
    ask(server, V1, 1)
    server.withdraw_version(V1)
    assert [reply for _, reply, _ in router.sent] == [VersionGone(epoch=0, version=1)]


def test_a_version_is_in_use_from_the_first_request_until_done(server: ChunkServer, now: list[float]) -> None:
    server.offer_version(served(V1))
    assert server.in_use_since(V1) is None
    now[0] = 3.0
    ask(server, V1, 0)
    now[0] = 4.0
    ask(server, V1, 1)
    assert server.in_use_since(V1) == 3.0
    server.handle_message([b"peer", encode(FetchDone(epoch=0, version=1))])
    assert server.in_use_since(V1) is None


def test_a_receiver_that_falls_silent_or_never_ends_protects_nothing(server: ChunkServer, now: list[float]) -> None:
    server.offer_version(served(V1))
    ask(server, V1, 0)
    now[0] = 5.0
    assert server.in_use_since(V1) is None
    for second in range(5, 61, 4):
        now[0] = float(second)
        ask(server, V1, 0)
    assert server.in_use_since(V1) == 0.0
    now[0] = 60.0
    ask(server, V1, 0)
    assert server.in_use_since(V1) is None
