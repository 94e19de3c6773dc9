"""Two trainers, each a fork, write the same version into one folder at the same time.

    epoch 1   begins to save version 1 .............. writes it, to the end
    epoch 2             begins to save version 1 ......................... writes it, to the end

Each has trained on batches of its own, so their weights differ.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig
from tests.support.trainer_programs.checkpoint_facts import (
    catch_message,
    delay_write,
    hash_tensor_files,
    list_folders,
    load_test_policy,
    open_checkpoints,
    train_test_step,
)


def rivals(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    import trainer.checkpoint.folder
    import trainer.model.policy  # noqa: F401  (imported once, not in both)

    old, new = (Rival.saving(config, model, platform, folder, epoch) for epoch in (1, 2))
    found: dict[str, Any] = {}
    found["old"], found["new"] = (rival.finished() for rival in (old, new))
    found["names"] = list_folders(folder)
    found["latest"] = (folder / "latest").read_text().strip()
    found["epoch"] = json.loads((folder / "00000001" / "manifest.json").read_text())["epoch"]
    found["files"] = hash_tensor_files(folder / "00000001")
    return found


@dataclass
class Rival:
    """One of the trainers, from outside."""

    channel: Connection
    process: int

    @classmethod
    def saving(cls, config: RunConfig, model: Path, platform: Any, folder: Path, epoch: int) -> Rival:
        """It has begun to save."""
        ours, theirs = Pipe()
        process = os.fork()
        if process == 0:
            write(config, model, platform, folder, epoch, theirs)
            os._exit(0)
        rival = cls(ours, process)
        rival.said()
        return rival

    def said(self) -> Any:
        assert self.channel.poll(120)
        return json.loads(self.channel.recv_bytes())

    def finished(self) -> Any:
        self.channel.send_bytes(b"write")
        last = self.said()
        os.waitpid(self.process, 0)
        return last


def write(config: RunConfig, model: Path, platform: Any, folder: Path, epoch: int, channel: Connection) -> None:
    from trainer.ranks.distributed import start_ranks

    start_ranks(config.trainer, platform, config.seed, 60.0)
    policy = load_test_policy(config, model, platform)
    train_test_step(policy, config, epoch)
    alone = open_checkpoints(config, folder.parent / f"rival-{epoch}")
    alone.save(policy, 1, epoch=epoch)
    alone.poll_saved(wait=True)
    saved = open_checkpoints(config, folder)
    with delay_write() as let_go:
        saved.save(policy, 1, epoch=epoch)
        channel.send_bytes(b'"saving"')
        assert channel.poll(120)
        let_go()
        refused = catch_message(lambda: saved.poll_saved(wait=True))
    mine = hash_tensor_files(folder.parent / f"rival-{epoch}" / "00000001")
    channel.send_bytes(json.dumps({"refused": refused, "files": mine}).encode())
