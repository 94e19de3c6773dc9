"""The receiver's side of the Unix socket to the rollout servers of its machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from async_grpo.utils.files import try_lock
from async_grpo.weights.node import local_socket
from async_grpo.weights.node.local_socket import (
    Hold,
    LocalClients,
    ReceiverPaths,
    ServerHello,
    is_abandoned,
    pack_message,
    remove_abandoned_files,
)


def test_a_server_killed_after_it_asked_twice_does_not_end_the_receiver(tmp_path: Path) -> None:
    clients = LocalClients(tmp_path / "node.sock", 10.0)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(tmp_path / "node.sock"))
        clients.handle_readable(clients.descriptors[0])
        server.sendall(
            pack_message(ServerHello(name="rollout-0")) + pack_message(Hold(number=1)) + pack_message(Hold(number=2))
        )
    clients.handle_readable(clients.descriptors[1])
    assert len(clients) == 0
    clients.close()


def test_files_of_a_receiver_are_abandoned_only_when_none_runs(tmp_path: Path) -> None:
    paths = ReceiverPaths(tmp_path / "node.weights")
    assert not is_abandoned(paths) and not remove_abandoned_files(paths)
    for path in (paths.store, paths.socket):
        path.touch()
    with paths.lock.open("w") as running:
        assert try_lock(running)
        assert not is_abandoned(paths) and not remove_abandoned_files(paths)
    assert is_abandoned(paths) and remove_abandoned_files(paths)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_was_removed_meanwhile_starts_no_second_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ReceiverPaths(tmp_path / "node.weights")

    def lock_what_was_removed(lock: int) -> bool:
        paths.lock.unlink()
        return try_lock(lock)

    monkeypatch.setattr(local_socket, "try_lock", lock_what_was_removed)
    assert local_socket.start_receiver(paths, local_socket.WeightsConfig()) is None
