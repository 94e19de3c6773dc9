"""`python -m benchmarks.checkpoint_memory`: host memory that a checkpoint takes, in bytes per parameter of the model.

    ranks 1: random model, one update --save--> folder --load--> ranks 2 (new processes)

Measured are the peaks of resident memory (VmHWM of /proc, reset before) above the memory before the save or load. For a
load the table also has the memory that stays allocated: the optimizer's moments, which a fresh optimizer does not have
yet.

The baseline is Megatron's own path in the same ranks: the `fully_reshardable` state of its optimizer, through
`dist_checkpointing.save` and `dist_checkpointing.load`. Child processes write its files, and their memory is not
counted.

On a CPU, offloading frees nothing: the "device" memory is host memory and is counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from async_grpo.config import RunConfig, validate

HIDDEN = 512
LAYERS = 12
VOCAB = 32_768
TIMEOUT_S = 600.0
RETURN_MEMORY = "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072"
"""Makes glibc return freed tensors to the system. Otherwise a peak could reuse memory freed before it and not show."""


@dataclass(frozen=True)
class Case:
    """A way to save and load."""

    ranks: int
    offload: bool = False
    megatron: bool = False

    @property
    def name(self) -> str:
        """Name of the row."""
        parts = ["Megatron" if self.megatron else "async_grpo"]
        parts.append("1 rank" if self.ranks == 1 else f"{self.ranks} ranks")
        if self.offload:
            parts.append("offload")
        return ", ".join(parts)


CASES = (
    Case(ranks=1),
    Case(ranks=2),
    Case(ranks=1, offload=True),
    Case(ranks=1, megatron=True),
    Case(ranks=2, megatron=True),
)


def main() -> None:
    """Measure all cases, or act as one rank of a case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_memory")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"layers of the model, {HIDDEN} wide")
    parser.add_argument("--rank", type=int, nargs=3, help=argparse.SUPPRESS, metavar=("CASE", "RANK", "LOADS"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        case_index, rank, loads = options.rank
        case = CASES[case_index]
        result = measure_rank(case, rank, bool(loads), options.precision, options.layers, options.folder)
        print(json.dumps(result))
        return

    table = Table(title=f"bytes of host memory per parameter and rank, {options.precision}", title_justify="left")
    table.add_column("")
    for column in ("parameters", "peak of save", "peak of load", "after load"):
        table.add_column(column, justify="right")
    for index, case in enumerate(CASES):
        with tempfile.TemporaryDirectory(prefix="checkpoint-memory-") as name:
            folder = Path(name)
            saves = run_ranks(index, loads=False, options=options, folder=folder)
            loads = run_ranks(index, loads=True, options=options, folder=folder)
        table.add_row(
            case.name,
            f"{saves[0]['parameters']:,}",
            " / ".join(f"{rank['peak']:.1f}" for rank in saves),
            " / ".join(f"{rank['peak']:.1f}" for rank in loads),
            " / ".join(f"{rank['afterwards']:.1f}" for rank in loads),
        )
    Console(width=120).print(table)


def run_ranks(case_index: int, *, loads: bool, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start all ranks of a case and return the result of each."""
    case = CASES[case_index]
    command = [sys.executable, "-m", "benchmarks.checkpoint_memory"]
    command += ["--precision", options.precision, "--layers", str(options.layers), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": RETURN_MEMORY}
    ranks = []
    for rank in range(case.ranks):
        as_rank = ["--rank", str(case_index), str(rank), str(int(loads))]
        ranks.append(subprocess.Popen([*command, *as_rank], stdout=subprocess.PIPE, env=environment))

    outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{case.name}: a rank failed. Its error is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure_rank(case: Case, rank: int, loads: bool, precision: str, layers: int, folder: Path) -> dict[str, Any]:
    """Save or load as one rank.

    Returns the number of parameters, and per parameter the additional bytes at the peak and afterwards.
    """
    config = make_config(case, precision, folder)
    policy = make_policy(config, rank, layers, folder / f"rendezvous-{loads}")
    if not loads:
        for buffer in policy.wrapped.buffers:
            buffer.grad_data.normal_()
        policy.update_weights(1e-6)  # the optimizer allocates its moments in its first step
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())

    gc.collect()
    before = read_resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    if case.megatron:
        use_megatron(policy, folder / "megatron", loads)
    else:
        use_checkpoints(policy, config, folder / "checkpoints", loads)
    peak = read_resident_bytes("VmHWM")
    gc.collect()
    afterwards = read_resident_bytes("VmRSS")

    from trainer.ranks.distributed import stop_ranks

    stop_ranks()
    return {
        "parameters": parameters,
        "peak": (peak - before) / parameters,
        "afterwards": (afterwards - before) / parameters,
    }


def make_config(case: Case, precision: str, folder: Path) -> RunConfig:
    """Make a configuration of data-parallel ranks on the CPU."""
    trainer = {"processes": case.ranks, "optimizer": {"offload": case.offload}}
    model = {"path": str(folder), "precision": precision}
    return validate({"name": "memory", "runs_dir": str(folder), "model": model, "trainer": trainer}, "benchmark")


def make_policy(config: RunConfig, rank: int, layers: int, rendezvous: Path) -> Any:
    """Join the other ranks and make a policy with random weights."""
    from trainer.platform import select_platform

    platform = select_platform("cpu")
    platform.activate(config.trainer)
    import torch.distributed as dist
    from transformers import Qwen2Config

    from trainer.model.builder import DTYPES
    from trainer.model.policy import build_policy
    from trainer.ranks.distributed import lay_out

    store = dist.FileStore(str(rendezvous), config.trainer.processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.trainer.processes)
    lay_out(config.trainer, config.seed)
    hf = Qwen2Config(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    return build_policy(hf, platform, config.trainer, DTYPES[config.model.precision], temperature=1.0)


def use_checkpoints(policy: Any, config: RunConfig, folder: Path, loads: bool) -> None:
    """Save or load as the trainer does."""
    from trainer.checkpoint.folder import CheckpointFolder

    checkpoints = CheckpointFolder(folder, config.trainer.checkpoint)
    if loads:
        checkpoints.load(policy, 1)
    else:
        checkpoints.save(policy, 1, epoch=1)
        checkpoints.poll_saved(wait=True)


def use_megatron(policy: Any, folder: Path, loads: bool) -> None:
    """Save or load with Megatron's own functions."""
    from megatron.core import dist_checkpointing

    from trainer.checkpoint.state import metadata
    from trainer.model.optimizer_state import distributed_optimizers, prepare_for_checkpoint

    # Megatron expects moments, but torch's AdamW has none before its first step.
    prepare_for_checkpoint(policy.optimizer)
    for part in distributed_optimizers(policy.optimizer):
        del part.sharded_param_state_fully_reshardable  # removes our override, so that Megatron's method is called
    model = policy.sharded_state(metadata())
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=loads, metadata=metadata())
    folder.mkdir(exist_ok=True)
    if loads:
        loaded = dist_checkpointing.load({"model": model, "optimizer": optimizer}, str(folder))
        # Only the model is loaded. Megatron's optimizer rejects the state: it looks for the `step` of torch's AdamW.
        policy.load_sharded_state(loaded["model"])
    else:
        dist_checkpointing.save({"model": model, "optimizer": optimizer}, str(folder))


def read_resident_bytes(field: str) -> int:
    """Read VmRSS or VmHWM of this process."""
    match = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


if __name__ == "__main__":
    main()
