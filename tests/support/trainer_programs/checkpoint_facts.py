"""Writes checkpoints in many ways as one rank, also with kills and rival trainers, and records the results.

    python -m tests.support.trainer_programs.checkpoint_facts CONFIG.yaml MODEL OUT.json

Killed trainers and rivals are forks, created before this process has process groups or threads.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from async_grpo.config import RunConfig, load
from async_grpo.errors import CheckpointError, WaitTimeout
from async_grpo.wire.board import Evaluation
from buffer.base import Resume
from trainer.platform import select_platform

RESUMED_AT = 2
HEAD_VERSION = 4
LOGGED_CALLS = (
    "logger.log_takeover",
    "logger.log_step",
    "exporter.publish_weights",
    "logger.mark_serving",
    "coordinator.report_replay",
)


def main() -> None:
    config = load(Path(sys.argv[1]))
    model = Path(sys.argv[2])
    out = Path(sys.argv[3])
    platform = select_platform("cpu")
    platform.activate(config.trainer)
    from tests.support.trainer_programs import checkpoint_kills, checkpoint_rivals
    from trainer.ranks.distributed import start_ranks, stop_ranks

    facts: dict[str, Any] = {
        "lives": checkpoint_kills.lives(config, model, platform),
        "rivals": checkpoint_rivals.rivals(config, model, platform, out.parent / "rivals"),
    }
    start_ranks(config.trainer, platform, config.seed, 60.0)
    folder = out.parent
    for key, collect_fact in FACTS.items():
        facts[key] = collect_fact(config, model, platform, folder / key)
    facts["other_rank"] = read_failed_part(folder / "other")
    facts["replay"] = replay_versions(config)
    out.write_text(json.dumps(facts))
    stop_ranks()


def read_decay_groups(config: RunConfig, model: Path, platform: Any, _folder: Path) -> dict[str, list[str]]:
    """Return the names of parameters with and without weight decay, from torch's groups after a step."""
    policy = load_test_policy(config, model, platform)
    train_test_step(policy, config, 0)
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    found: dict[str, list[str]] = {"decayed": [], "spared": []}
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for parameter, (group, _) in part.model_param_group_index_map.items():
            kind = "decayed" if part.optimizer.param_groups[group]["weight_decay"] > 0 else "spared"
            found[kind].append(names[id(parameter)])
    return found


def save_during_steps(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Return the files of a checkpoint written without training and of one written during two steps."""
    policy = load_test_policy(config, model, platform)
    train_test_step(policy, config, 0)
    still = open_checkpoints(config, folder / "still")
    busy = open_checkpoints(config, folder / "busy")
    still.save(policy, 1, epoch=1)
    still.poll_saved(wait=True)
    with delay_write() as let_go:
        busy.save(policy, 1, epoch=1)
        unsettled = busy.poll_saved(wait=False)
        for version in (1, 2):
            train_test_step(policy, config, version)
        let_go()
    settled = busy.poll_saved(wait=True)
    files = [hash_tensor_files(folder / name / "00000001") for name in ("still", "busy")]
    return {"unsettled": unsettled, "settled": settled, "still": files[0], "busy": files[1]}


def save_on_full_disk(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Write a second checkpoint without space on the disk, and a third one with space."""
    policy = load_test_policy(config, model, platform)
    saved = open_checkpoints(config, folder)
    saved.save(policy, 1, epoch=1)
    saved.poll_saved(wait=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    saved.save(policy, 2, epoch=1)
    refused = catch_message(lambda: saved.poll_saved(wait=True))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    newest = saved.newest_version()
    names = list_folders(folder)
    saved.load(policy, 1)
    saved.save(policy, 3, epoch=1)
    saved.poll_saved(wait=True)
    return {"refused": refused, "newest": newest, "names": names, "afterwards": list_folders(folder)}


def read_failed_part(folder: Path) -> dict[str, str]:
    """Return rank 0's errors for a rank that cannot write, and for one that never reports."""
    from trainer.checkpoint.snapshot import read_part, write_part

    class Broken:
        def write(self) -> None:
            raise OSError("no space left on device")

    folder.mkdir()
    broken: Any = Broken()
    return {
        "broken": catch_message(lambda: write_part(broken, folder, 3), OSError),
        "heard": catch_message(lambda: read_part(folder, 3, 5.0), OSError),
        "silent": catch_message(lambda: read_part(folder, 2, 0.1), WaitTimeout),
    }


def save_after_successor(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Save as a trainer of epoch 1 when a trainer of epoch 2 has saved already."""
    policy = load_test_policy(config, model, platform)
    saved = open_checkpoints(config, folder)
    saved.save(policy, 8, epoch=2)
    saved.poll_saved(wait=True)
    saved.save(policy, 6, epoch=1)
    return {"refused": catch_message(lambda: saved.poll_saved(wait=True)), "newest": saved.newest_version()}


def load_damaged(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Return the errors for a checkpoint with a changed byte and for a renamed one."""
    policy = load_test_policy(config, model, platform)
    saved = open_checkpoints(config, folder)
    saved.save(policy, 1, epoch=1)
    saved.poll_saved(wait=True)
    shutil.copytree(folder / "00000001", folder / "00000002")
    renamed = catch_message(lambda: saved.load(policy, 2))
    flip_byte(folder / "00000001" / "__0_0.distcp")
    return {"renamed": renamed, "changed": catch_message(lambda: saved.load(policy, 1))}


def load_newest_intact(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Load while the newest checkpoint, and then every checkpoint, has a changed byte."""
    policy = load_test_policy(config, model, platform)
    saved = open_checkpoints(config, folder)
    weights = [weights_hash(policy)]
    for version in (1, 2):
        train_test_step(policy, config, version)
        saved.save(policy, version, epoch=1)
        saved.poll_saved(wait=True)
        weights.append(weights_hash(policy))
    found: dict[str, Any] = {}
    for version in (2, 1):
        flip_byte(folder / f"{version:08d}" / "__0_0.distcp")
        policy = load_test_policy(config, model, platform)
        loaded, damage = saved.load_newest(policy)
        found[f"without {version}"] = [loaded, weights_hash(policy) == weights[loaded], damage]
    return found


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def weights_hash(policy: Any) -> str:
    digest = hashlib.sha256()
    for parameter in policy.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def copy_to_failing_store(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Save four checkpoints while the store fails for the second and third; return the safe version after each."""
    from trainer.checkpoint.store import RunStore

    store = RunStore.open(f"file://{folder}/store", "run")
    policy = load_test_policy(config, model, platform)
    saved = open_checkpoints(config, folder / "run")
    warnings = list[str]()
    saved.store = store
    saved.warn = lambda _, message: warnings.append(message)
    write = store.objects.write
    safe = []
    for version in (1, 2, 3, 4):
        broken = version in (2, 3)
        store.objects.write = fail_to_write if broken else write  # type: ignore[method-assign]
        saved.save(policy, version, epoch=1)
        safe.append([saved.poll_saved(wait=True), saved.uncopied_version])
    store.objects.write = fail_to_write  # type: ignore[method-assign]
    resumed = open_checkpoints(config, folder / "run")
    resumed.store = RunStore.open(f"file://{folder}/other", "run")
    resumed.warn = lambda _, text: warnings.append(text)
    resumed.store.objects.write = fail_to_write  # type: ignore[method-assign]
    resumed.start_copy(4)
    safe.append([resumed.poll_saved(wait=True), resumed.uncopied_version])
    return {
        "safe": safe,
        "warnings": warnings,
        "stored": [checkpoint.version for checkpoint in store.list_checkpoints()],
    }


def fail_to_write(*_: object) -> None:
    raise OSError("the bucket is unreachable")


def prune_undeletable(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Save three checkpoints with keep=2, where the oldest cannot be deleted at first."""
    from trainer.checkpoint import folder as module

    policy = load_test_policy(config, model, platform)
    saved = open_checkpoints(config, folder, keep=2)
    warnings = list[str]()
    saved.warn = lambda _, message: warnings.append(message)
    remove = shutil.rmtree

    def remove_unless_busy(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "00000001":
            raise OSError(39, "Directory not empty")
        remove(path, *args, **options)

    safe = []
    with patch.object(module.shutil, "rmtree", remove_unless_busy):
        for version in (1, 2, 3):
            saved.save(policy, version, epoch=1)
            safe.append(saved.poll_saved(wait=True))
    left = list_folders(folder)
    saved.save(policy, 4, epoch=1)
    saved.poll_saved(wait=True)
    return {"safe": safe, "warnings": warnings, "left": left, "afterwards": list_folders(folder)}


def prune_and_export(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Return the folders after each of six checkpoints and exports. Evaluations are one version late."""
    policy = load_test_policy(config, model, platform)
    saved = open_checkpoints(config, folder, keep=2, keep_best=1, every_steps=1, export_every_steps=1)
    accuracies = [0.1, 0.9, 0.2, 0.3, 0.4, 0.5]
    after = []
    for version in range(1, 7):
        evaluations = [
            Evaluation(version=v, prompts=1, samples=1, sampled_accuracy=accuracies[v - 1]) for v in range(1, version)
        ]
        saved.save(policy, version, epoch=1, evaluations=evaluations)
        saved.poll_saved(wait=True)
        saved.start_export(policy, model, version, evaluations)
        saved.wait_for_export()
        after.append(list_folders(folder))
    best = (folder / "best").read_text().strip()
    saved.mark_best([*evaluations, Evaluation(version=6, prompts=1, samples=1, sampled_accuracy=0.95)])
    return {
        "after": after,
        "best": best,
        "judged": list_folders(folder),
        "new_best": (folder / "best").read_text().strip(),
    }


def commit_after_save(config: RunConfig, model: Path, platform: Any, folder: Path) -> list[Any]:
    """Return the versions committed to the buffer while a checkpoint is being written, and after its end."""
    from trainer.loop import TrainerRun
    from trainer.run_logger import TrainerLogger

    class Buffer:
        def __init__(self) -> None:
            self.committed: list[int] = []

        def commit_checkpoint(self, version: int) -> None:
            self.committed.append(version)

    buffer: Any = Buffer()
    saved = open_checkpoints(config, folder)
    run = TrainerRun(config, model, load_test_policy(config, model, platform), buffer, saved, TrainerLogger(config), 4)
    run.epoch = 1
    run.saved_version = 0
    run.resumable_versions = [0]
    with delay_write() as let_go:
        run.save_checkpoint()
        run.commit_saved_checkpoints(wait=False)
        early = [list(buffer.committed), saved.newest_version()]
        let_go()
    run.save_everything()
    return [early, [buffer.committed, saved.newest_version()]]


def replay_versions(config: RunConfig) -> list[str]:
    """Return the calls of a loop that resumes below the servers' version, in order.

    Only the loop is real: steps take no time, and nothing is trained, published or written.
    """
    from trainer import loop

    world = MagicMock()
    world.coordinator.resume_run.return_value = Resume(epoch=2, head_version=HEAD_VERSION)
    world.checkpoints.poll_saved.return_value = None
    world.train_next_version.side_effect = [MagicMock()] * (HEAD_VERSION - RESUMED_AT) + [None]
    parts = {"WeightExporter": lambda *_: world.exporter, "train_next_version": world.train_next_version}
    with patch.multiple(loop, **parts, step_row=lambda *_, **__: {}):
        args = (world.policy, world.coordinator, world.checkpoints, world.logger, RESUMED_AT)
        run = loop.TrainerRun(config, Path(), *args)
        run.gap_watch = world.gap_watch  # no step has a gap here
        loop.train(run)
    return [name for name, *_ in world.mock_calls if name in LOGGED_CALLS]


def resume_offloaded(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Return hashes of weights and optimizer after four steps with a resumption in the middle."""
    found: dict[str, Any] = {}
    for precision in ("float32", "bfloat16"):
        for offloaded in (False, True):
            changed = change_optimizer(config, precision, offloaded)
            name = f"{precision}-{offloaded}"
            saved = open_checkpoints(changed, folder / name)
            policy = load_test_policy(changed, model, platform)
            for version in (0, 1):
                train_test_step(policy, changed, version)
            saved.save(policy, 2, epoch=1)
            saved.poll_saved(wait=True)
            policy = load_test_policy(changed, model, platform)
            saved.load(policy, 2)
            found[name] = [train_test_step(policy, changed, version) for version in (2, 3)]
            found[f"{name}-state"] = state_hash(policy)
    return found


def save_lent_tensors(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Save an offloaded optimizer without training and during a step; count the tensors that were copied."""
    from trainer.checkpoint.snapshot import SavePlanner
    from trainer.model.optimizer_state import parameter_states

    config = change_optimizer(config, "bfloat16", True)
    policy = load_test_policy(config, model, platform)
    train_test_step(policy, config, 0)
    still = open_checkpoints(config, folder / "still")
    busy = open_checkpoints(config, folder / "busy")
    still.save(policy, 1, epoch=1)
    still.poll_saved(wait=True)
    copied: list[int] = []
    copy_plan = SavePlanner.copy

    def record_copies(planner: Any, plan: Any) -> None:
        copy_plan(planner, plan)
        addresses = [copy.untyped_storage().data_ptr() for copy in planner._copies.values() if hasattr(copy, "numel")]
        copied.extend(addresses)

    with patch.object(SavePlanner, "copy", record_copies):
        busy.save(policy, 1, epoch=1)
    homes = {
        tensor.untyped_storage().data_ptr()
        for parameter, state in parameter_states(policy.optimizer)
        for tensor in (parameter.data, state["exp_avg"], state["exp_avg_sq"])
    }
    train_test_step(policy, config, 1)
    busy.poll_saved(wait=True)
    files = [hash_tensor_files(folder / name / "00000001") for name in ("still", "busy")]
    return {"copied": len(homes - set(copied)), "still": files[0], "busy": files[1]}


def count_master_reads(config: RunConfig, model: Path, platform: Any, _folder: Path) -> list[int]:
    """Return all numbers of reads of a parameter's host master in one step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from trainer.model.optimizer_state import parameter_states

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copied_to = args[:1] if function is torch.ops.aten.copy_.default else ()
            if function in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
                for tensor in tree_leaves(args[len(copied_to) :]):
                    if isinstance(tensor, torch.Tensor):
                        counts[tensor.data_ptr()] += 1
            return function(*args, **(kwargs or {}))

    policy = load_test_policy(change_optimizer(config, "bfloat16", True), model, platform)
    masters = [master.data_ptr() for master, _ in parameter_states(policy.optimizer)]
    counts: Counter[int] = Counter()
    with Reads():
        train_test_step(policy, config, 0)
    return sorted({counts[home] for home in masters})


def find_copied_state(config: RunConfig, model: Path, platform: Any, _folder: Path) -> dict[str, list[str]]:
    """Return the optimizer's sharded tensors that do not share its memory, when saving and when loading."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from trainer.checkpoint.state import current_layout, live_tensors, policy_state

    policy = load_test_policy(change_optimizer(config, "bfloat16", False), model, platform)
    found: dict[str, list[str]] = {}
    for name, written_by in (("save", None), ("load", current_layout())):
        state = policy_state(policy, written_by=written_by)["optimizer"]
        own = {tensor.untyped_storage().data_ptr() for tensor in live_tensors(policy)}
        tensors = [entry for entry in nested_values(state["param_state"]) if isinstance(entry, ShardedTensor)]
        assert tensors
        found[name] = [entry.key for entry in tensors if entry.data.untyped_storage().data_ptr() not in own]
    return found


def change_optimizer(config: RunConfig, precision: str, offloaded: bool) -> RunConfig:
    optimizer = config.trainer.optimizer.model_copy(update={"offload": offloaded})
    trainer = config.trainer.model_copy(update={"optimizer": optimizer})
    model = config.model.model_copy(update={"precision": precision})
    return config.model_copy(update={"trainer": trainer, "model": model})


def state_hash(policy: Any) -> str:
    from trainer.model.optimizer_state import parameter_states

    digest = hashlib.sha256()
    for parameter, state in parameter_states(policy.optimizer):
        for tensor in (parameter.data, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    for _, tensor in policy.export_merged():
        digest.update(tensor.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_test_policy(config: RunConfig, model: Path, platform: Any) -> Any:
    from trainer.model.policy import load_policy

    return load_policy(config, model, platform)


def train_test_step(policy: Any, config: RunConfig, version: int) -> list[float]:
    from async_grpo.telemetry.timeline import PhaseTimer
    from tests.support.trainer_programs.batches import make_batch
    from trainer.step.step import train_step

    lr = config.trainer.optimizer.lr
    result = train_step(policy, make_batch(version), config, lr=lr, phases=PhaseTimer())
    return [result["loss"], result["grad_norm"]]


def open_checkpoints(config: RunConfig, folder: Path, **changes: Any) -> Any:
    from trainer.checkpoint.folder import CheckpointFolder

    return CheckpointFolder(folder, config.trainer.checkpoint.model_copy(update=changes))


class delay_write:
    """Delay the writing of checkpoints in the block until the returned function is called."""

    def __enter__(self) -> Callable[[], None]:
        from trainer.checkpoint.snapshot import RankSnapshot

        self._original = write = RankSnapshot.write
        gate = threading.Event()

        def wait_and_write(snapshot: Any) -> Any:
            assert gate.wait(60)
            return write(snapshot)

        RankSnapshot.write = wait_and_write
        return gate.set

    def __exit__(self, *_: object) -> None:
        from trainer.checkpoint.snapshot import RankSnapshot

        RankSnapshot.write = self._original


def catch_message(call: Callable[[], object], kind: type[Exception] = CheckpointError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def hash_tensor_files(folder: Path) -> dict[str, str]:
    """Hash the files with tensors. Index and manifest differ, because they contain names of files."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.distcp")}


def list_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


FACTS: dict[str, Callable[[RunConfig, Path, Any, Path], Any]] = {
    "decay": read_decay_groups,
    "background": save_during_steps,
    "full_disk": save_on_full_disk,
    "overtaken": save_after_successor,
    "damaged": load_damaged,
    "fallback": load_newest_intact,
    "copies": copy_to_failing_store,
    "stuck": prune_undeletable,
    "kept": prune_and_export,
    "order": commit_after_save,
    "offload": resume_offloaded,
    "brought": count_master_reads,
    "in_place": find_copied_state,
    "lent": save_lent_tensors,
}
"""Key in OUT.json -> function that collects the fact in a folder of its own."""


if __name__ == "__main__":
    main()
