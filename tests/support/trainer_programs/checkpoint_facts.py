"""One rank writes checkpoints in many ways, is killed, has a rival, and notes what came of it.

    python -m tests.support.trainer_programs.checkpoint_facts CONFIG.yaml MODEL OUT.json

What is killed and the rivals are forks, made before this process has groups or threads of its own.
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

    found: dict[str, Any] = {
        "lives": checkpoint_kills.lives(config, model, platform),
        "rivals": checkpoint_rivals.rivals(config, model, platform, out.parent / "rivals"),
    }
    start_ranks(config.trainer, platform, config.seed, 60.0)
    written = (background, full_disk, overtaken, damaged, fallback, copies, stuck, kept, order)
    for fact in (decay, *written, offload, brought, in_place, lent):
        found[fact.__name__] = fact(config, model, platform, out.parent / fact.__name__)
    found["other_rank"] = other_rank(out.parent / "other")
    found["replay"] = replay(config)
    out.write_text(json.dumps(found))
    stop_ranks()


def decay(config: RunConfig, model: Path, platform: Any, _folder: Path) -> dict[str, list[str]]:
    """Names of the parameters that decay and that do not, as they stand in torch's groups after a step."""
    policy = make(config, model, platform)
    step(policy, config, 0)
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    found: dict[str, list[str]] = {"decayed": [], "spared": []}
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for parameter, (group, _) in part.model_param_group_index_map.items():
            kind = "decayed" if part.optimizer.param_groups[group]["weight_decay"] > 0 else "spared"
            found[kind].append(names[id(parameter)])
    return found


def background(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """The files of a checkpoint written while nothing else happens, and of one written during two steps."""
    policy = make(config, model, platform)
    step(policy, config, 0)
    still = checkpoints(config, folder / "still")
    busy = checkpoints(config, folder / "busy")
    still.save(policy, 1, epoch=1)
    still.poll_saved(wait=True)
    with held_back() as let_go:
        busy.save(policy, 1, epoch=1)
        unsettled = busy.poll_saved(wait=False)
        for version in (1, 2):
            step(policy, config, version)
        let_go()
    settled = busy.poll_saved(wait=True)
    files = [hashes(folder / name / "00000001") for name in ("still", "busy")]
    return {"unsettled": unsettled, "settled": settled, "still": files[0], "busy": files[1]}


def full_disk(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """A second checkpoint that the disk has no room for, and a third one when it has."""
    policy = make(config, model, platform)
    saved = checkpoints(config, folder)
    saved.save(policy, 1, epoch=1)
    saved.poll_saved(wait=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    saved.save(policy, 2, epoch=1)
    refused = refusal(lambda: saved.poll_saved(wait=True))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    newest = saved.newest_version()
    names = listing(folder)
    saved.load(policy, 1)
    saved.save(policy, 3, epoch=1)
    saved.poll_saved(wait=True)
    return {"refused": refused, "newest": newest, "names": names, "afterwards": listing(folder)}


def other_rank(folder: Path) -> dict[str, str]:
    """What rank 0 hears of a rank that cannot write, and of one that says nothing."""
    from trainer.checkpoint.snapshot import read_part, write_part

    class Broken:
        def write(self) -> None:
            raise OSError("no space left on device")

    folder.mkdir()
    broken: Any = Broken()
    return {
        "broken": refusal(lambda: write_part(broken, folder, 3), OSError),
        "heard": refusal(lambda: read_part(folder, 3, 5.0), OSError),
        "silent": refusal(lambda: read_part(folder, 2, 0.1), WaitTimeout),
    }


def overtaken(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """A trainer of epoch 1 that wakes up beside the checkpoint of epoch 2."""
    policy = make(config, model, platform)
    saved = checkpoints(config, folder)
    saved.save(policy, 8, epoch=2)
    saved.poll_saved(wait=True)
    saved.save(policy, 6, epoch=1)
    return {"refused": refusal(lambda: saved.poll_saved(wait=True)), "newest": saved.newest_version()}


def damaged(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """What is said of a checkpoint with a byte changed and of one with another name, and what they did to weights."""
    policy = make(config, model, platform)
    saved = checkpoints(config, folder)
    saved.save(policy, 1, epoch=1)
    saved.poll_saved(wait=True)
    shutil.copytree(folder / "00000001", folder / "00000002")
    renamed = refusal(lambda: saved.load(policy, 2))
    flip_byte(folder / "00000001" / "__0_0.distcp")
    return {"renamed": renamed, "changed": refusal(lambda: saved.load(policy, 1))}


def fallback(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """What is loaded where the newest checkpoint, and then every checkpoint, has a byte changed."""
    policy = make(config, model, platform)
    saved = checkpoints(config, folder)
    weights = [weights_hash(policy)]
    for version in (1, 2):
        step(policy, config, version)
        saved.save(policy, version, epoch=1)
        saved.poll_saved(wait=True)
        weights.append(weights_hash(policy))
    found: dict[str, Any] = {}
    for version in (2, 1):
        flip_byte(folder / f"{version:08d}" / "__0_0.distcp")
        policy = make(config, model, platform)
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


def copies(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Four checkpoints and what was safe after each, while the store fails for the second and the third."""
    from trainer.checkpoint.store import RunStore

    store = RunStore.open(f"file://{folder}/store", "run")
    policy = make(config, model, platform)
    saved = checkpoints(config, folder / "run")
    warnings = list[str]()
    saved.store = store
    saved.warn = lambda _, message: warnings.append(message)
    write = store.objects.write
    safe = []
    for version in (1, 2, 3, 4):
        broken = version in (2, 3)
        store.objects.write = no_store if broken else write  # type: ignore[method-assign]
        saved.save(policy, version, epoch=1)
        safe.append([saved.poll_saved(wait=True), saved.uncopied_version])
    store.objects.write = no_store  # type: ignore[method-assign]
    resumed = checkpoints(config, folder / "run")
    resumed.store = RunStore.open(f"file://{folder}/other", "run")
    resumed.warn = lambda _, text: warnings.append(text)
    resumed.store.objects.write = no_store  # type: ignore[method-assign]
    resumed.start_copy(4)
    safe.append([resumed.poll_saved(wait=True), resumed.uncopied_version])
    return {"safe": safe, "warnings": warnings, "stored": [held.version for held in store.list_checkpoints()]}


def no_store(*_: object) -> None:
    raise OSError("the bucket is away")


def stuck(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Three checkpoints of which two are kept, and the oldest cannot be deleted at first."""
    from trainer.checkpoint import folder as module

    policy = make(config, model, platform)
    saved = checkpoints(config, folder, keep=2)
    warnings = list[str]()
    saved.warn = lambda _, message: warnings.append(message)
    remove = shutil.rmtree

    def busy(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "00000001":
            raise OSError(39, "Directory not empty")
        remove(path, *args, **options)

    safe = []
    with patch.object(module.shutil, "rmtree", busy):
        for version in (1, 2, 3):
            saved.save(policy, version, epoch=1)
            safe.append(saved.poll_saved(wait=True))
    left = listing(folder)
    saved.save(policy, 4, epoch=1)
    saved.poll_saved(wait=True)
    return {"safe": safe, "warnings": warnings, "left": left, "afterwards": listing(folder)}


def kept(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Folders after each of six checkpoints and exports, with one evaluation a version behind."""
    policy = make(config, model, platform)
    saved = checkpoints(config, folder, keep=2, keep_best=1, every_steps=1, export_every_steps=1)
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
        after.append(listing(folder))
    best = (folder / "best").read_text().strip()
    saved.mark_best([*evaluations, Evaluation(version=6, prompts=1, samples=1, sampled_accuracy=0.95)])
    return {"after": after, "best": best, "judged": listing(folder), "new_best": (folder / "best").read_text().strip()}


def order(config: RunConfig, model: Path, platform: Any, folder: Path) -> list[Any]:
    """What the buffer was told while a checkpoint was being written, and when the loop had seen to its end."""
    from trainer.loop import TrainerRun
    from trainer.run_logger import TrainerLogger

    class Buffer:
        def __init__(self) -> None:
            self.told: list[int] = []

        def commit_checkpoint(self, version: int) -> None:
            self.told.append(version)

    buffer: Any = Buffer()
    saved = checkpoints(config, folder)
    run = TrainerRun(config, model, make(config, model, platform), buffer, saved, TrainerLogger(config), 4)
    run.epoch = 1
    run.saved_version = 0
    run.resumable_versions = [0]
    with held_back() as let_go:
        run.save_checkpoint()
        run.commit_saved_checkpoints(wait=False)
        early = [list(buffer.told), saved.newest_version()]
        let_go()
    run.save_everything()
    return [early, [buffer.told, saved.newest_version()]]


def replay(config: RunConfig) -> list[str]:
    """A trainer resumes below the version that servers have: what its loop tells of itself, in order.

    The loop alone: steps are made at once, and nothing is trained, published or written.
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


def offload(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """Hashes of weights and optimizer after four steps, in the middle of which a checkpoint is resumed from."""
    found: dict[str, Any] = {}
    for precision in ("float32", "bfloat16"):
        for offloaded in (False, True):
            changed = reconfigured(config, precision, offloaded)
            name = f"{precision}-{offloaded}"
            saved = checkpoints(changed, folder / name)
            policy = make(changed, model, platform)
            for version in (0, 1):
                step(policy, changed, version)
            saved.save(policy, 2, epoch=1)
            saved.poll_saved(wait=True)
            policy = make(changed, model, platform)
            saved.load(policy, 2)
            found[name] = [step(policy, changed, version) for version in (2, 3)]
            found[f"{name}-state"] = state_hash(policy)
    return found


def lent(config: RunConfig, model: Path, platform: Any, folder: Path) -> dict[str, Any]:
    """The files of a checkpoint of an offloaded optimizer, written in peace and during a step, and what was copied."""
    from trainer.checkpoint.snapshot import SavePlanner
    from trainer.model.optimizer_state import parameter_states

    config = reconfigured(config, "bfloat16", True)
    policy = make(config, model, platform)
    step(policy, config, 0)
    still = checkpoints(config, folder / "still")
    busy = checkpoints(config, folder / "busy")
    still.save(policy, 1, epoch=1)
    still.poll_saved(wait=True)
    held: list[int] = []
    copy = SavePlanner.copy

    def watched(planner: Any, plan: Any) -> None:
        copy(planner, plan)
        held.extend(one.untyped_storage().data_ptr() for one in planner._copies.values() if hasattr(one, "numel"))

    with patch.object(SavePlanner, "copy", watched):
        busy.save(policy, 1, epoch=1)
    homes = {
        tensor.untyped_storage().data_ptr()
        for parameter, state in parameter_states(policy.optimizer)
        for tensor in (parameter.data, state["exp_avg"], state["exp_avg_sq"])
    }
    step(policy, config, 1)
    busy.poll_saved(wait=True)
    files = [hashes(folder / name / "00000001") for name in ("still", "busy")]
    return {"copied": len(homes - set(held)), "still": files[0], "busy": files[1]}


def brought(config: RunConfig, model: Path, platform: Any, _folder: Path) -> list[int]:
    """How often a step reads the master of a parameter from its home: all numbers that occur."""
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

    policy = make(reconfigured(config, "bfloat16", True), model, platform)
    masters = [master.data_ptr() for master, _ in parameter_states(policy.optimizer)]
    counts: Counter[int] = Counter()
    with Reads():
        step(policy, config, 0)
    return sorted({counts[home] for home in masters})


def in_place(config: RunConfig, model: Path, platform: Any, _folder: Path) -> dict[str, list[str]]:
    """Stored tensors of the optimizer that are not its own memory, in a save and in a load."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from trainer.checkpoint.state import current_layout, live_tensors, policy_state

    policy = make(reconfigured(config, "bfloat16", False), model, platform)
    found: dict[str, list[str]] = {}
    for name, written_by in (("save", None), ("load", current_layout())):
        state = policy_state(policy, written_by=written_by)["optimizer"]
        own = {tensor.untyped_storage().data_ptr() for tensor in live_tensors(policy)}
        tensors = [entry for entry in nested_values(state["param_state"]) if isinstance(entry, ShardedTensor)]
        assert tensors
        found[name] = [entry.key for entry in tensors if entry.data.untyped_storage().data_ptr() not in own]
    return found


def reconfigured(config: RunConfig, precision: str, offloaded: bool) -> RunConfig:
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


def make(config: RunConfig, model: Path, platform: Any) -> Any:
    from trainer.model.policy import load_policy

    return load_policy(config, model, platform)


def step(policy: Any, config: RunConfig, version: int) -> list[float]:
    from async_grpo.telemetry.timeline import PhaseTimer
    from tests.support.trainer_programs.batches import make_batch
    from trainer.step.step import train_step

    lr = config.trainer.optimizer.lr
    result = train_step(policy, make_batch(version), config, lr=lr, phases=PhaseTimer())
    return [result["loss"], result["grad_norm"]]


def checkpoints(config: RunConfig, folder: Path, **changes: Any) -> Any:
    from trainer.checkpoint.folder import CheckpointFolder

    return CheckpointFolder(folder, config.trainer.checkpoint.model_copy(update=changes))


class held_back:
    """Within it, writing begins when the function that it gives is called."""

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


def refusal(call: Callable[[], object], kind: type[Exception] = CheckpointError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def hashes(folder: Path) -> dict[str, str]:
    """Hashes of the files that hold tensors; the index and the manifest hold names of their own."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.distcp")}


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


if __name__ == "__main__":
    main()
