"""The trainer's program of `async-grpo accept`: real layers, collectives, checkpoints and publisher of a platform.

    python -m async_grpo.lab.accept.rank --config FILE --model FOLDER                     serves requests, one per line
    python -m async_grpo.lab.accept.rank --config FILE --model FOLDER --collectives DIR   all ranks, once

It is a separate process because a platform patches torch and Megatron for its whole process. The references are also
computed here, on the CPU in float64 and without Megatron.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig, load
from async_grpo.errors import CONFIG_FAULTS, EXIT_CONFIG
from async_grpo.lab.bench.rig import LineServer
from async_grpo.wire import Batch, Group, Sample, Task, VersionSpan, encode, logprobs_to_bytes, tokens_to_bytes
from trainer.platform import Platform, select_platform

COLLECTIVE_TIMEOUT_S = 120.0
"""Maximum seconds that ranks wait for each other in one collective."""
BATCH_LENGTHS = {"prompt": (3, 60), "median": 24, "longest": 64}
"""Sequence lengths of the batches, chosen to vary widely."""
LEARNING_RATE = 1e-2
"""Large enough that each step changes the log-probabilities by far more than any rounding of bfloat16."""


def main() -> None:
    """Run the program; see the module."""
    parser = argparse.ArgumentParser(prog="async_grpo.lab.accept.rank", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--collectives", type=Path)
    arguments = parser.parse_args()
    config = load(arguments.config)
    if config.trainer.processes > 1 and "RANK" not in os.environ:
        _start_ranks(config, arguments.config, arguments.model)
        return

    # Claim standard output before torch and Megatron are imported: what they print must not mix with the answers.
    server = LineServer()
    try:
        # Activate before importing trainer.ranks: the platform patches torch and Megatron before they are used.
        platform = select_platform(config.trainer.platform)
        platform.activate(config.trainer)
        from trainer.ranks.distributed import start_ranks, stop_ranks

        start_ranks(config.trainer, platform, config.seed, COLLECTIVE_TIMEOUT_S)
    except CONFIG_FAULTS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)

    if arguments.collectives is not None:
        from async_grpo.lab.accept.numerics import collective_errors

        errors = collective_errors(platform.device)
        (arguments.collectives / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(errors))
        stop_ranks()
        return
    asyncio.run(server.serve(TrainerSide(config, arguments.model, platform)))


def _start_ranks(config: RunConfig, file: Path, model: Path) -> None:
    """Run this program with the same arguments in every rank of the node."""
    from trainer.node_main import Node

    argv = (sys.executable, *sys.orig_argv[1:])
    asyncio.run(Node(config, file, model, 0, argv=argv).run())


class AcceptBoard:
    """Replaces the coordinator: keeps the publisher's address, which the stage passes to the engine."""

    address = b""

    def set_publisher(self, address: Any) -> None:
        """Keep the address."""
        self.address = encode(address)

    def publish_version(self, version: int) -> None:
        """Do nothing: the stage requests each update of the engine."""


class TrainerSide:
    """One rank with the small model. Method `answer_X` handles request X."""

    def __init__(self, config: RunConfig, model: Path, platform: Platform) -> None:
        from trainer.checkpoint.folder import CheckpointFolder
        from trainer.model.policy import load_policy

        self._config = config
        self._model = model
        self._platform = platform
        self._policy = load_policy(config, model, platform)
        self._checkpoints = CheckpointFolder(config.run_dir / "checkpoints", config.trainer.checkpoint)
        self._board = AcceptBoard()
        self._exporter: Any = None

    async def answer_numbers(self) -> dict[str, float]:
        """Return the errors of attention, log-probabilities and gradients, and the memory of the device."""
        from async_grpo.lab.accept.numerics import numeric_errors
        from trainer.batch.packing import own_micro_batches

        batches = own_micro_batches(self._batch(0), self._config)
        errors = numeric_errors(self._policy, batches, self._model, self._config.sampling.temperature)
        memory = self._platform.memory_use()
        return {**errors, "peak_gib": memory.peak_bytes / 2**30, "total_gib": memory.total_bytes / 2**30}

    async def answer_steps(self, versions: list[int]) -> dict[str, Any]:
        """Train one step on the batch of each version and return the new state."""
        from async_grpo.telemetry.timeline import PhaseTimer
        from trainer.step.step import train_step

        for version in versions:
            train_step(self._policy, self._batch(version), self._config, lr=LEARNING_RATE, phases=PhaseTimer())
        return self._state()

    async def answer_save(self, version: int) -> dict[str, Any]:
        """Write a checkpoint and wait until it is on disk."""
        self._checkpoints.save(self._policy, version, epoch=1)
        self._checkpoints.poll_saved(wait=True)
        return {}

    async def answer_load(self, version: int) -> dict[str, Any]:
        """Load a checkpoint and return the new state."""
        self._checkpoints.load(self._policy, version)
        return self._state()

    async def answer_publish(self, version: int) -> dict[str, Any]:
        """Publish the weights as the trainer does; return the stall of a step and the digest of every tensor."""
        from trainer.weights import WeightExporter

        if self._exporter is None:
            self._exporter = WeightExporter(self._policy, self._config, self._board, epoch=1)  # type: ignore[arg-type]
        # Wait for queued device work first: the stall must not include the training step.
        self._platform.synchronize()
        started_s = time.monotonic()
        self._exporter.publish_weights(version)
        stall_s = time.monotonic() - started_s

        tensors = dict(self._policy.export_merged())
        return {
            "stall_s": stall_s,
            "bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "digests": {name: _digest([tensor]) for name, tensor in tensors.items()},
            "address": self._board.address.hex(),
        }

    async def answer_gap(self, version: int, samples: list[dict[str, Any]]) -> dict[str, float]:
        """Return the log-probability gap between engine and trainer on these samples, measured as in a run."""
        from trainer.step.step import measure_gap

        groups = [_group(index, version, sample) for index, sample in enumerate(samples)]
        return measure_gap(self._policy, Batch(epoch=1, version=version, groups=groups), self._config)

    async def close(self) -> None:
        """Close the publisher."""
        if self._exporter is not None:
            self._exporter.close()

    def _batch(self, version: int) -> Batch:
        from async_grpo.lab.bench.trainer.setup import BatchShape, make_batch

        shape = BatchShape(groups=4, group_size=4, seed=version + 1, **BATCH_LENGTHS)  # type: ignore[arg-type]
        return make_batch(shape, self._policy.hf.vocab_size)

    def _state(self) -> dict[str, Any]:
        """Return the digest of all weights, masters and moments, and the log-probabilities of a batch."""
        from async_grpo.lab.accept.numerics import policy_logprobs
        from trainer.batch.packing import own_micro_batches
        from trainer.checkpoint.state import live_tensors

        digest = _digest(live_tensors(self._policy))
        batches = own_micro_batches(self._batch(0), self._config)
        return {"digest": digest, "logprobs": policy_logprobs(self._policy, batches).tolist()}


def _digest(tensors: Iterable[Any]) -> str:
    """Return the hash over the bytes of all tensors."""
    import torch
    import xxhash

    digest = xxhash.xxh3_64()
    for tensor in tensors:
        # NumPy has no bfloat16, so the bytes are viewed as uint8 in torch.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _group(index: int, version: int, sample: dict[str, Any]) -> Group:
    tokens = sample["tokens"]
    task = Task(
        index=index,
        prompt=f"accept {index}",
        prompt_tokens=tokens_to_bytes(sample["prompt"]),
        answer="",
    )
    completion = Sample(
        tokens=tokens_to_bytes(tokens),
        logprobs=logprobs_to_bytes(sample["logprobs"]),
        spans=[VersionSpan(version, 0, len(tokens))],
        reward=0.0,
    )
    return Group(seq=index, attempt=1, task=task, samples=[completion])


if __name__ == "__main__":
    main()
