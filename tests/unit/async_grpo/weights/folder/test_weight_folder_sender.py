"""What the sender writes into a folder that fails now and then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.folder import sender as sender_module
from async_grpo.weights.folder.chain import VersionRecord, decode_with_digest, object_name
from async_grpo.weights.folder.objects import FolderObjects
from async_grpo.weights.folder.sender import FolderWeightSender
from async_grpo.weights.manifest import make_layout
from async_grpo.weights.shared_memory import remove_stores
from tests.support.waiting import until

RUN = f"unit-folder-sender-{os.getpid()}"
LAYOUT = make_layout([("a", "uint8", [256]), ("b", "uint8", [256])])


class FailingObjects(FolderObjects):
    """A folder in which the first call that `fails` accepts fails."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fails: Callable[[str, str], bool] = lambda call, name: False
        self.failures = 0

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        self._fail_once("write", name)
        super().write(name, parts)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._fail_once("remove", name)
        super().remove(names)

    def _fail_once(self, call: str, name: str) -> None:
        if self.failures == 0 and self.fails(call, name):
            self.failures += 1
            raise OSError("no route to the server")


class Publishing:
    """A sender, and what it has written."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, dense_every: int) -> None:
        self.objects = FailingObjects(folder)
        monkeypatch.setattr(sender_module, "open_objects", lambda _: self.objects)
        config = WeightsConfig(
            transport="shared_filesystem",
            location=str(folder),
            chunk_bytes=4096,
            heartbeat_s=0.05,
            dense_every=dense_every,
        )
        self.sender = FolderWeightSender(LAYOUT, RUN, 1, config)

    async def publish(self, version: int) -> None:
        """Publish a version, and wait until it is announced."""
        weights = np.full(256, version, np.uint8)
        self.sender.publish_weights(version, [("a", weights), ("b", weights)])
        await until(lambda: self.sender._newest is not None and self.sender._newest.manifest.version == version)

    def has(self, end: str) -> bool:
        """True if there is an object whose name ends with this."""
        return any(name.endswith(end) for name in self.objects.list_names(self.sender.address.announce))

    def record(self, version: int) -> VersionRecord:
        """The record of a version, as it lies in the folder."""
        name = object_name(self.sender.address.announce, version, "version")
        return decode_with_digest(self.objects.read(name), VersionRecord, name)


@pytest.fixture
def open_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Publishing]]:
    opened: list[Publishing] = []

    def open_it(dense_every: int) -> Publishing:
        opened.append(Publishing(tmp_path, monkeypatch, dense_every))
        return opened[-1]

    yield open_it
    for publishing in opened:
        publishing.sender.close()
    remove_stores(RUN)


async def test_a_dense_version_stays_dense_when_old_ones_cannot_be_removed(
    open_sender: Callable[[int], Publishing],
) -> None:
    publishing = open_sender(1)
    publishing.objects.fails = lambda call, name: call == "remove" and name.endswith(".dense")
    for version in range(4):
        await publishing.publish(version)
    assert publishing.objects.failures == 1
    assert publishing.record(2).dense and publishing.record(3).dense  # version 2 could not remove version 0
    await until(lambda: not publishing.has("000.dense") and not publishing.has("001.dense"))  # the next one did


async def test_a_write_that_is_repeated_counts_the_bytes_of_the_chain_once(
    open_sender: Callable[[int], Publishing],
) -> None:
    publishing = open_sender(100)
    await publishing.publish(0)
    publishing.objects.fails = lambda call, name: call == "write" and name.endswith("1.version")
    await publishing.publish(1)
    assert publishing.objects.failures == 1
    changes = publishing.record(1).changes
    assert publishing.sender._chain_bytes == max(entry.stop for entry in changes.values())
