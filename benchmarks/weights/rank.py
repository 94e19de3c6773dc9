"""One of several ranks of a trainer, or an engine: the children of `ranks`. They answer requests, line by line.

    python -m benchmarks.weights.rank RANK RANKS LAYERS FOLDER     its part of the model, as a trainer has it
    python -m benchmarks.weights.rank engine                       takes what a receiver holds into its memory

A rank has the parameters and no optimizer: publishing reads the parameters alone. Its exporter is the trainer's own.
An engine copies every tensor of the version into memory of its own, which is what is left of a reload where the engine
does nothing with the weights.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.lab.bench.rig import AnswerLines
from async_grpo.models.shapes import shape_of
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.source_reader import SourceReader

TENSOR_PARALLEL = 2
ENGINE = "engine"
PIECE_BYTES = 128 << 20
"""More than any cache holds, and little beside the model."""


class KeptBoard:
    """In place of the coordinator: keeps the address, and nobody asks for the version."""

    address: Any = None

    def set_publisher(self, address: Any) -> None:
        """Keep the address."""
        self.address = address

    def publish_version(self, version: int) -> None:
        """Nobody waits for tickets."""


class RankSide:
    """A rank with its part of the model. Every method `answer_X` answers the request X."""

    def __init__(self, rank: int, ranks: int, layers: int, folder: Path) -> None:
        from trainer.platform import select_platform

        config = _config(ranks, folder)
        platform = select_platform("cpu")
        platform.activate(config.trainer)
        import torch
        import torch.distributed as dist
        from transformers import Qwen2Config

        from trainer.model.builder import build_model
        from trainer.model.hf_weights import find_positions
        from trainer.model.policy import Policy
        from trainer.model.shards import assign_shards
        from trainer.ranks.distributed import lay_out
        from trainer.weights import WeightExporter

        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "ranks"), ranks), rank=rank, world_size=ranks)
        lay_out(config.trainer, config.seed)
        hf = Qwen2Config(
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=layers,
            num_attention_heads=12,
            num_key_value_heads=2,
            vocab_size=151_936,
            tie_word_embeddings=True,
        )
        model, none = build_model(hf, platform, torch.bfloat16, config.trainer), _none()
        policy = Policy(hf, model, none, none, 0.0, 1.0)
        self._board = KeptBoard()
        self._policy = policy
        self._exporter = WeightExporter(policy, config, self._board, epoch=1)  # type: ignore[arg-type]
        self._bits = [parameter.data.view(-1).view(torch.int16) for parameter in model.parameters()]
        parameters = dict(model.named_parameters())
        shards = assign_shards(hf, find_positions(), range(ranks))[rank]
        shape = shape_of(hf)
        self._share = sum(view.nbytes for shard in shards for view in shard.parameter_views(parameters, shape))
        piece = min(self._share, PIECE_BYTES)
        self._source, self._target = np.ones(piece, np.uint8), np.zeros(piece, np.uint8)
        self._run = config.local_name

    async def answer_touch(self) -> None:
        """Change every value."""
        for bits in self._bits:
            bits.bitwise_xor_(1)

    async def answer_memcpy(self) -> float:
        """Seconds of one memcpy of as many bytes as this rank copies, from and to one piece of memory."""
        started_s, left = time.monotonic(), self._share
        while left > 0:
            size = min(left, len(self._target))
            np.copyto(self._target[:size], self._source[:size])
            left -= size
        return time.monotonic() - started_s

    async def answer_publish(self, version: int) -> dict[str, Any]:
        """Publish: how long the trainer stands still, and how long it would if it waited for the copy."""
        started_s = time.monotonic()
        self._exporter.publish_weights(version)
        stall_s = time.monotonic() - started_s
        self._policy.reading.wait()
        address = self._board.address
        told = None if address is None else [address.epoch, address.announce, address.requests]
        return {"stall_s": stall_s, "copied_s": time.monotonic() - started_s, "address": told, "run": self._run}

    async def close(self) -> None:
        """End the publisher."""
        self._exporter.close()


class CopyingEngine:
    """Memory for the weights."""

    def __init__(self) -> None:
        self._reader = SourceReader()
        self._memory: dict[str, np.ndarray[Any, Any]] = {}

    async def answer_load(self, path: str, version: int) -> float:
        """Copy the tensors of the version; the seconds that it took."""
        held = self._reader.open(HeldWeights.in_store(Path(path), epoch=1, version=version))
        if not self._memory:
            self._memory = {spec.name: np.zeros(spec.nbytes, np.uint8) for spec in held.layout.tensors}
        started_s = time.monotonic()
        for spec, tensor in held:
            self._memory[spec.name][:] = np.frombuffer(tensor, np.uint8)
        held.verify()
        return time.monotonic() - started_s

    async def close(self) -> None:
        """Nothing is left."""


def _none() -> Any:
    """What publishing does not use."""
    return None


def _config(ranks: int, folder: Path) -> Any:
    from async_grpo.config import validate

    return validate(
        {
            "name": f"bench-ranks-{ranks}",
            "runs_dir": str(folder),
            "model": {"random": {}, "precision": "bfloat16"},
            "weights": {"encoding": "dense"},
            "rollout": {"vllm": {"max_model_len": 2048}},
            "trainer": {
                "processes": ranks,
                "tensor_parallel": TENSOR_PARALLEL,
                "pipeline_parallel": ranks // TENSOR_PARALLEL,
                "threads": 1,
                "micro_batch_tokens": 8192,
            },
        },
        "bench",
    )


def main() -> None:
    """Entry point; see the module."""
    lines = AnswerLines()
    kind, *rest = sys.argv[1:]
    if kind == ENGINE:
        asyncio.run(lines.serve(CopyingEngine()))
        return
    ranks, layers, folder = rest
    asyncio.run(lines.serve(RankSide(int(kind), int(ranks), int(layers), Path(folder))))


if __name__ == "__main__":
    main()
