"""Train with a copy in a bucket, die in the middle of an upload, go on in an empty folder; and train straight through.

    python -m tests.support.trainer_programs.copied_checkpoints CONFIG.yaml MODEL URL OUT.json

Every life is a fork, made before this process has groups or threads of its own (obstore has some). The one that is
killed has copied SAVED, and is in the middle of the copy of TORN when it dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig, load
from tests.support.trainer_programs.checkpoint_facts import hash_tensor_files, load_test_policy, train_test_step
from trainer.checkpoint.store import RunStore
from trainer.platform import select_platform

SAVED = 2
TORN = 4
LAST = 6


def main() -> None:
    config = load(Path(sys.argv[1]))
    model = Path(sys.argv[2])
    url = sys.argv[3]
    out = Path(sys.argv[4])
    platform = select_platform("cpu")
    platform.activate(config.trainer)
    import trainer.checkpoint.folder
    import trainer.model.policy  # noqa: F401  (imported once, not in every life)

    straight, killed, elsewhere = (out.parent / name / config.name for name in ("straight", "killed", "elsewhere"))
    live(lambda: train(config, model, platform, straight))
    death = live(lambda: train(config, model, platform, killed, url, tear=True))
    live(lambda: pull(RunStore.open(url, config.name), elsewhere))
    live(lambda: train(config, model, platform, elsewhere, url))
    facts = json.loads((elsewhere / "pulled").read_text()) | {"death": death}
    facts["last"] = {folder.parent.name: losses(folder) for folder in (straight, elsewhere)}
    facts["stored"] = [[found.version, found.epoch] for found in RunStore.open(url, config.name).list_checkpoints()]
    out.write_text(json.dumps(facts))


def pull(store: RunStore, run_dir: Path) -> None:
    left = [found.version for found in store.list_checkpoints()]
    store.pull_run(run_dir, print)
    resumed = int((run_dir / "checkpoints/latest").read_text())
    (run_dir / "pulled").write_text(json.dumps({"left": left, "resumed": resumed}))


def losses(run_dir: Path) -> dict[str, Any]:
    """Losses and gradient norms by step, and the hashes of the last checkpoint's tensors."""
    steps = dict(json.loads(line) for line in (run_dir / "losses").read_text().splitlines())
    return {"steps": steps, "files": hash_tensor_files(run_dir / f"checkpoints/{LAST:08d}")}


def live(work: Callable[[], None]) -> int:
    """Carry it out in a fork; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def train(
    config: RunConfig, model: Path, platform: Any, run_dir: Path, url: str | None = None, *, tear: bool = False
) -> None:
    """Resume, train to LAST, and save every second version."""
    from trainer.checkpoint.folder import CheckpointFolder
    from trainer.ranks.distributed import start_ranks

    start_ranks(config.trainer, platform, config.seed, 60.0)
    policy = load_test_policy(config, model, platform)
    store = RunStore.open(url, config.name) if url else None
    checkpoints = CheckpointFolder(run_dir / "checkpoints", config.trainer.checkpoint, store=store)
    version = checkpoints.newest_version() or 0
    if version:
        checkpoints.load(policy, version)
        checkpoints.start_copy(version)
        checkpoints.poll_saved(wait=True)
    while version < LAST:
        if tear and version + 1 == TORN:
            die_in_the_middle(store)
        found = train_test_step(policy, config, version)
        version = version + 1
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / "losses").open("a") as file:
            file.write(json.dumps([str(version), found]) + "\n")
        if version % SAVED == 0:
            checkpoints.save(policy, version, epoch=1 + (1 if version > TORN else 0))
            checkpoints.poll_saved(wait=True)


def die_in_the_middle(store: Any) -> None:
    """Let the first half of the next big file be sent, and then SIGKILL this process."""
    write = store.objects.write

    def torn(name: str, parts: Iterable[bytes]) -> None:
        def half() -> Iterable[bytes]:
            whole = b"".join(parts)
            yield whole[: len(whole) // 2]
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

        write(name, half() if name.endswith("__0_1.distcp") or name.endswith("manifest.json") else parts)

    store.objects.write = torn


if __name__ == "__main__":
    main()
