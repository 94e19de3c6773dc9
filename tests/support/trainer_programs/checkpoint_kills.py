"""Write checkpoints without a pause, get killed at any moment, resume; several times.

Every life is a fork. It resumes from the newest checkpoint, says so, and says of each checkpoint when it is safe. It is
killed after some of them, at a moment of the next one that chance chooses.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig

KILLS = 6
MOST_CHECKPOINTS = 3
"""Most checkpoints of one life."""


def lives(config: RunConfig, model: Path, platform: Any) -> list[dict[str, Any]]:
    import trainer.checkpoint.folder
    import trainer.model.policy  # noqa: F401  (imported once, not in every life)

    dice = random.Random(7)
    return [life(config, model, platform, dice) for _ in range(KILLS)]


def life(config: RunConfig, model: Path, platform: Any, dice: random.Random) -> dict[str, Any]:
    """The version resumed from, the newest that was called safe, and what the kill left behind."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        write_for_ever(config, model, platform, os.fdopen(theirs, "w", buffering=1))
    os.close(theirs)
    with os.fdopen(ours) as said:
        resumed = said.readline().strip()
        began_s = time.monotonic()
        count = dice.randint(1, MOST_CHECKPOINTS)
        heard = [said.readline() for _ in range(count)]
        time.sleep(dice.uniform(0, (time.monotonic() - began_s) / count))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        safe = [int(line) for line in (*heard, *said) if line.strip()]
    names = [path.name for path in (config.run_dir / "checkpoints").iterdir()]
    return {"resumed": resumed, "safe": max(safe, default=None), "draft": any("draft" in name for name in names)}


def write_for_ever(config: RunConfig, model: Path, platform: Any, say: Any) -> None:
    """Raises what `load` raises: then nothing is said, and the test sees it."""
    from trainer.checkpoint.folder import CheckpointFolder
    from trainer.model.policy import load_policy
    from trainer.ranks.distributed import start_ranks

    start_ranks(config.trainer, platform, config.seed, 60.0)
    policy = load_policy(config, model, platform)
    checkpoints = CheckpointFolder(config.run_dir / "checkpoints", config.trainer.checkpoint)
    newest = checkpoints.newest_version()
    if newest is not None:
        checkpoints.load(policy, newest)
    say.write(f"{-1 if newest is None else newest}\n")
    version = newest or 0
    while True:
        version += 1
        checkpoints.save(policy, version, epoch=1)
        checkpoints.poll_saved(wait=True)
        say.write(f"{version}\n")
