"""Whether all nodes see the same folder of checkpoints: each leaves a file there that the others look for."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from async_grpo.errors import ConfigError

LOOK_S = 30.0
"""A file of another machine may take so long to appear: as long as NFS remembers a folder without it."""

_LOOK_EVERY_S = 0.1


@contextlib.contextmanager
def left_file(folder: Path) -> Iterator[str]:
    """The name of a new file in the folder (made if it is not there); removed afterwards. Raises ConfigError."""
    file = folder / f".met-{os.urandom(8).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error}), and every node writes its part of a checkpoint there. Mount "
            "runs_dir for writing on each of them"
        ) from None
    try:
        yield file.name
    finally:
        file.unlink(missing_ok=True)


async def is_there(folder: Path, name: str, look_s: float = LOOK_S) -> bool:
    """Whether the file appears in the folder in that time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(look_s):
            while not (folder / Path(name).name).exists():  # noqa: ASYNC110  (nobody could set an event)
                await asyncio.sleep(_LOOK_EVERY_S)
            return True
    return False
