"""Folders in places where every user may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from async_grpo.errors import ConfigError
from async_grpo.utils.files import make_private_folder
from async_grpo.weights import shared_memory
from async_grpo.weights.manifest import make_layout
from async_grpo.weights.store import WeightStore


def test_a_new_folder_and_ones_own_are_used(tmp_path: Path) -> None:
    for _ in range(2):
        make_private_folder(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_may_use_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"{folder} .*mode {mode:o}.*rm -r {folder}"):
        make_private_folder(folder)


def test_a_link_is_refused_also_to_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(ConfigError, match="is a link"):
        make_private_folder(tmp_path / "link")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"user {os.getuid()}"):
        make_private_folder(tmp_path / "theirs")


def test_no_store_is_made_in_a_folder_that_others_may_use(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="mode 777"):
        WeightStore.create(folder / "trainer.weights", make_layout([("a", "uint8", [8])]))
    assert list(folder.iterdir()) == []


def test_files_behind_a_link_of_another_user_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "trainer.weights").touch()
    (tmp_path / "async-grpo-run").symlink_to(tmp_path / "home")
    shared_memory.remove_trainer_files("run")
    assert (tmp_path / "home" / "trainer.weights").exists()
