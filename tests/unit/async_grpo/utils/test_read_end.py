"""The end of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.utils.files import read_end


@pytest.mark.parametrize(
    ("most", "start", "read"),
    [(4, 0, b"6789"), (100, 0, b"0123456789"), (4, 8, b"89"), (4, 3, b"6789"), (4, 20, b"")],
)
def test_no_more_than_the_end_is_read_and_nothing_before_the_start(
    tmp_path: Path, most: int, start: int, read: bytes
) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"0123456789")
    assert read_end(file, most, start=start) == read
