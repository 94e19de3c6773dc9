"""Train and publish after every step, in one case after another, and write down what each side holds.

    python -m tests.support.trainer_programs.published_steps CASES.json

A case: {"config": FILE, "model": FOLDER, "out": FILE, "readers": N, "steps": N, "apart": BOOL}. `out` gets one JSON
line a version: the hashes of the trainer's tensors (adapters added to their weights), and what every reader said of its
own. No step begins before all have spoken.

After the first version the store gives no slot before `publish` has returned on every rank: a rank that waited for the
slot, or for another rank, in its training would wait for ever. Ranks that are `apart` do not see the store of rank 0,
as on another node.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import xxhash

from async_grpo.config import RunConfig
from async_grpo.utils.child_process import child_argv
from async_grpo.weights.base import MergeBase
from async_grpo.weights.sender import WeightSender
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.wire import encode
from async_grpo.wire.board import PublisherAddress
from tests.support.trainer_programs.running import run_cases
from trainer.platform import Platform


class OneRun:
    """In place of the coordinator: the address lies in a file, and nobody asks for the version."""

    def __init__(self, address: Path) -> None:
        self._address = address

    def set_publisher(self, address: PublisherAddress) -> None:
        written = self._address.with_suffix(".new")
        written.write_bytes(encode(address))
        written.rename(self._address)

    def publish_version(self, version: int) -> None: ...


class SlotAfterwards:
    """A sender that gives a slot only after `publish` has returned everywhere."""

    def __init__(self, sender: WeightSender, returned: threading.Event) -> None:
        self._sender = sender
        self._returned = returned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def begin(self, version: int) -> int:
        assert self._returned.wait(60), "publish has not returned on every rank"
        return self._sender.begin_version(version)


def run(config: RunConfig, case: dict[str, Any], platform: Platform) -> None:
    import torch.distributed as dist

    import trainer.weights
    from async_grpo.telemetry.timeline import PhaseTimer
    from tests.support.trainer_programs.batches import make_batch
    from trainer.model.policy import load_policy
    from trainer.ranks.distributed import is_rank_zero
    from trainer.step.step import train_step

    out = Path(case["out"])
    policy = load_policy(config, Path(case["model"]), platform)
    address = out.with_suffix(".address")
    returned = threading.Event()
    make_sender = trainer.weights.make_sender
    with ExitStack() as patches:
        sender = mock.patch("trainer.weights.make_sender", lambda *facts: SlotAfterwards(make_sender(*facts), returned))
        patches.enter_context(sender)
        if case["apart"]:
            patches.enter_context(mock.patch("trainer.shared_slots.try_connect", lambda *_: None))
        exporter = trainer.weights.WeightExporter(policy, config, OneRun(address), epoch=1)
    returned.set()  # the first version is copied at once
    readers = [read(config, address, number, case) for number in range(case["readers"] * is_rank_zero())]
    for version in range(case["steps"] + 1):
        if version > 0:
            returned.clear()
            train_step(policy, make_batch(version), config, lr=config.trainer.optimizer.lr, phases=PhaseTimer())
        exporter.publish_weights(version)
        dist.barrier()
        returned.set()
        hashes = {name: hash_of(tensor) for name, tensor in policy.export_merged()}
        if is_rank_zero():
            said = [json.loads(reader.stdout.readline()) for reader in readers]
            with out.open("a") as lines:
                lines.write(json.dumps({"version": version, "hashes": hashes, "readers": said}) + "\n")
    for reader in readers:
        reader.wait(30)
    exporter.close()
    if is_rank_zero():
        remove_stores(config.name_with_digest)


def read(config: RunConfig, address: Path, number: int, case: dict[str, Any]) -> subprocess.Popen[str]:
    store = store_path(config.name_with_digest, f"node-{number}")
    lora = config.model.lora
    base = None
    if lora is not None:
        base = MergeBase(folder=case["model"], dtype=config.model.precision, scale=lora.scale)
    told = (config.weights.model_dump_json(), str(case["steps"]), msgspec.json.encode(base).decode())
    arguments = [str(store), str(address), *told]
    command = child_argv([sys.executable, "-m", "tests.support.weight_reader", *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def hash_of(tensor: Any) -> str:
    import torch

    return xxhash.xxh3_64_hexdigest(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


if __name__ == "__main__":
    run_cases(run)
