"""A trainer without a model: rollback -> take, publish, release, and a checkpoint every few steps.

Two of them run. One holds the lock and trains; the other waits for the lock, which the kernel releases when its holder
dies. Sometimes one does not wait, and takes over while the other is alive. That one must then be fenced, and stop.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import time
from pathlib import Path

from async_grpo.errors import BufferFault, Fenced, WaitTimeout
from async_grpo.staleness import age
from async_grpo.wire import Batch
from buffer import ReplayBuffer
from tests.support.buffer_crashes.journal import Journal, digest_group

CHECKPOINT_EVERY = 3
TAKE_TIMEOUT_S = 0.5
LONGEST_STEP_S = 0.01
IMPATIENT = 0.2
LONGEST_PATIENCE_S = 2.0
LOOK_EVERY_S = 0.01


class Trainer:
    """A trainer without a model. `checkpoints`: folder that both trainers share."""

    def __init__(self, buffer: ReplayBuffer, journal: Journal, checkpoints: Path, rng: random.Random) -> None:
        self._buffer = buffer
        self._journal = journal
        self._checkpoints = checkpoints
        self._rng = rng
        self._epoch = self._version = 0

    async def run(self) -> bool:
        """Train until the horizon is reached (True), or until another trainer has taken over (False)."""
        await self._wait_for_turn()
        try:
            if not (await self._buffer.stats()).ended:
                await self._take_over()
                await self._train()
        except Fenced:
            self._journal.note("fenced", epoch=self._epoch)
            return False
        return True

    async def _wait_for_turn(self) -> None:
        """Wait for the lock, sometimes only for a limited time. The lock is kept until this process ends."""
        lock = os.open(self._checkpoints / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
        patience_s = LONGEST_PATIENCE_S * self._rng.random() if self._rng.random() < IMPATIENT else float("inf")
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(LOOK_EVERY_S)

    async def _take_over(self) -> None:
        """At the newest checkpoint; one that was committed since we looked is newer."""
        while True:
            self._version = newest_checkpoint(self._checkpoints)
            self._journal.note("take over?", version=self._version)
            try:
                resume = await self._buffer.rollback(self._version)
            except BufferFault:
                if newest_checkpoint(self._checkpoints) == self._version:
                    raise
                continue
            self._epoch = resume.epoch
            return self._journal.note("took over", version=self._version, epoch=resume.epoch)

    async def _train(self) -> None:
        while True:
            self._journal.note("take?", version=self._version, epoch=self._epoch)
            try:
                batch = await self._buffer.take_batch(
                    epoch=self._epoch, version=self._version, timeout_s=TAKE_TIMEOUT_S
                )
            except WaitTimeout:
                stats = await self._buffer.stats()
                if stats.used >= stats.horizon:
                    return await self._finish()
                continue
            self._note_batch(batch)
            await asyncio.sleep(LONGEST_STEP_S * self._rng.random())
            await self._publish(batch)

    def _note_batch(self, batch: Batch) -> None:
        self._journal.note(
            "took",
            version=batch.version,
            epoch=self._epoch,
            replayed=batch.replayed,
            seqs=[group.seq for group in batch.groups],
            digests=[digest_group(group) for group in batch.groups],
            ages=[age(batch.version, group.oldest_version) for group in batch.groups],
        )

    async def _publish(self, batch: Batch) -> None:
        self._version = batch.version + 1
        self._journal.note("release?", version=batch.version, epoch=self._epoch)
        await self._buffer.publish_version(epoch=self._epoch, version=self._version)
        await self._buffer.release_batch(batch)
        self._journal.note("released", version=batch.version, epoch=self._epoch)
        if self._version % CHECKPOINT_EVERY == 0:
            await self._save()

    async def _save(self) -> None:
        (self._checkpoints / str(self._version)).touch()
        self._journal.note("commit?", version=self._version, epoch=self._epoch)
        await self._buffer.commit_checkpoint(epoch=self._epoch, version=self._version)
        self._journal.note("committed", version=self._version, epoch=self._epoch)

    async def _finish(self) -> None:
        await self._save()
        await self._buffer.end_run()


def newest_checkpoint(checkpoints: Path) -> int:
    """Return the version of the newest checkpoint; 0 if there is none."""
    return max((int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()), default=0)
