"""A folder that is made in a draft: whole or not there, replaced or kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.utils.files import whole_folder


def write(folder: Path, text: str, *, shared: bool = False) -> None:
    with whole_folder(folder, shared=shared) as draft:
        (draft / "file").write_text(text)


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_that_fails_leaves_nothing(tmp_path: Path, shared: bool) -> None:
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "made", shared=shared) as draft:
        (draft / "file").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_replaces_the_old_one_with_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old").touch()
    write(tmp_path / "made", "new")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["file"]


def test_the_draft_of_a_killed_process_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "made.part").mkdir()
    (tmp_path / "made.part" / "half").touch()
    write(tmp_path / "made", "new")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["file"]


def test_of_two_processes_that_share_a_folder_the_first_result_stays(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "made", shared=True) as draft:
        (draft / "file").write_text("second")
        write(tmp_path / "made", "first", shared=True)
    assert (tmp_path / "made" / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "made"]
