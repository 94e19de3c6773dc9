"""`python -m benchmarks.checkpoint_memory`: host memory that a checkpoint takes, in bytes per parameter of the model.

Ranks of the CPU's trainer with a random model make an update, save, and end; others start, and load what was saved. The
figure of a save is the peak of the rank's resident memory (VmHWM of /proc, reset before) over what it had before; of a
load likewise, and beside it what is still there afterwards: the moments, which a fresh optimizer does not have yet.

The baseline is Megatron's own path in the same ranks: its optimizer's `fully_reshardable` state, given to
`dist_checkpointing.save` and read by `dist_checkpointing.load`. Its files are written by child processes, whose memory
is not counted.

With offload, the memory of the device is that of the host here, and counts as well.
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

HIDDEN, LAYERS, VOCAB = 512, 12, 32_768
TIMEOUT_S = 600.0
RETURN_MEMORY = "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072"
"""Freed tensors go back to the system, so that what a peak needs is not what was freed before it."""


@dataclass(frozen=True)
class Case:
    """One way to save and load."""

    ranks: int
    offload: bool = False
    megatron: bool = False

    @property
    def name(self) -> str:
        """Title of its row."""
        owner = "Megatron" if self.megatron else "async_grpo"
        return f"{owner}, {self.ranks} rank{'s' * (self.ranks > 1)}{', offload' * self.offload}"


CASES = (
    Case(ranks=1),
    Case(ranks=2),
    Case(ranks=1, offload=True),
    Case(ranks=1, megatron=True),
    Case(ranks=2, megatron=True),
)


def main() -> None:
    """Measure all cases, or be one rank of one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_memory")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"layers of the model, {HIDDEN} wide")
    parser.add_argument("--rank", type=int, nargs=3, help=argparse.SUPPRESS, metavar=("CASE", "RANK", "LOADS"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.rank is not None:
        case, rank, loads = typed.rank
        print(json.dumps(measure_rank(CASES[case], rank, bool(loads), typed.precision, typed.layers, typed.folder)))
        return

    table = Table(title=f"bytes of host memory per parameter and rank, {typed.precision}", title_justify="left")
    table.add_column("")
    for column in ("parameters", "peak of save", "peak of load", "after load"):
        table.add_column(column, justify="right")
    for number, case in enumerate(CASES):
        with tempfile.TemporaryDirectory(prefix="checkpoint-memory-") as folder:
            saves, loads = (run_ranks(number, loads=loads, typed=typed, folder=Path(folder)) for loads in (False, True))
        table.add_row(
            case.name,
            f"{saves[0]['parameters']:,}",
            *(" / ".join(f"{rank['peak']:.1f}" for rank in ranks) for ranks in (saves, loads)),
            " / ".join(f"{rank['kept']:.1f}" for rank in loads),
        )
    Console(width=120).print(table)


def run_ranks(case: int, *, loads: bool, typed: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The figures of all ranks of a case."""
    model = ["--precision", typed.precision, "--layers", str(typed.layers), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": RETURN_MEMORY}
    command = [sys.executable, "-m", "benchmarks.checkpoint_memory", *model, "--rank", str(case)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(int(loads))], stdout=subprocess.PIPE, env=environment)
        for rank in range(CASES[case].ranks)
    ]
    outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{CASES[case].name}: a rank has failed; its error is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure_rank(case: Case, rank: int, loads: bool, precision: str, layers: int, folder: Path) -> dict[str, Any]:
    """Save or load as one rank; bytes per parameter at the peak and afterwards, beyond those before."""
    config = make_config(case, precision, folder)
    policy = make_policy(config, rank, layers, folder / f"meeting-{loads}")
    if not loads:
        for buffer in policy.wrapped.buffers:
            buffer.grad_data.normal_()
        policy.update(1e-6)  # the optimizer makes its moments
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())

    gc.collect()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    if case.megatron:
        use_megatron(policy, folder / "megatron", loads)
    else:
        use_checkpoints(policy, config, folder / "checkpoints", loads)
    peak = resident_bytes("VmHWM")
    gc.collect()
    kept = resident_bytes("VmRSS")

    from trainer.ranks.distributed import stop_ranks

    stop_ranks()
    return {"parameters": parameters, "peak": (peak - before) / parameters, "kept": (kept - before) / parameters}


def make_config(case: Case, precision: str, folder: Path) -> RunConfig:
    """A configuration of data-parallel ranks on the CPU."""
    trainer = {"processes": case.ranks, "optimizer": {"offload": case.offload}}
    model = {"path": str(folder), "precision": precision}
    return validate({"name": "memory", "runs_dir": str(folder), "model": model, "trainer": trainer}, "benchmark")


def make_policy(config: RunConfig, rank: int, layers: int, meeting: Path) -> Any:
    """A policy with random weights."""
    from trainer.platform import select_platform

    platform = select_platform("cpu")
    platform.activate(config.trainer)
    import torch.distributed as dist
    from transformers import Qwen2Config

    from trainer.model.builder import DTYPES
    from trainer.model.policy import build_policy
    from trainer.ranks.distributed import lay_out

    store = dist.FileStore(str(meeting), config.trainer.processes)
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
    """Save or load by Megatron's own functions."""
    from megatron.core import dist_checkpointing

    from trainer.checkpoint.state import metadata
    from trainer.model.optimizer import distributed_parts, make_storable

    make_storable(policy.optimizer)  # Megatron expects moments, which torch's AdamW does not have before its first step
    for part in distributed_parts(policy.optimizer):
        del part.sharded_param_state_fully_reshardable  # ours
    model = policy.sharded_state(metadata())
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=loads, metadata=metadata())
    folder.mkdir(exist_ok=True)
    if loads:
        loaded = dist_checkpointing.load({"model": model, "optimizer": optimizer}, str(folder))
        # Its optimizer does not take the state from there: it looks for the `step` of torch's AdamW in it.
        policy.load_sharded_state(loaded["model"])
    else:
        dist_checkpointing.save({"model": model, "optimizer": optimizer}, str(folder))


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


if __name__ == "__main__":
    main()
