"""A file system of a few megabytes, so that a disk can really be full."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_mb: int) -> Iterator[Path]:
    """`folder`, on a tmpfs of its own. Skips the test where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=700", "small-disk", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk needs the right to mount one: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def leave_free(folder: Path, most_mb: int) -> Path:
    """Fill the disk of `folder` but for so much; returns the file that does, to be deleted."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):  # somebody else may have been quicker
        while (free := shutil.disk_usage(folder).free - (most_mb << 20)) > 0:
            stream.write(b"\0" * min(free, 1 << 20))
    return filler
