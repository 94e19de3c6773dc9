"""Child process of `ranks`: one rank of a trainer, or an engine. Answers requests, one JSON line each.

    python -m benchmarks.weights.rank RANK RANKS LAYERS FOLDER     holds its shards of the model, as in a trainer
    python -m benchmarks.weights.rank engine                       copies a receiver's version into its own memory

A rank has parameters and no optimizer, because publishing reads only the parameters. It uses the trainer's exporter.
An engine copies every tensor of the version, which is the least that any reload must do.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.lab.bench.rig import LineServer
from async_grpo.models.shapes import shape_of
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.source_reader import SourceReader

TENSOR_PARALLEL = 2
ENGINE = "engine"
PIECE_BYTES = 128 << 20
"""Size of the block that the baselines copy again and again: larger than any cache, small compared with the model."""


class AddressBoard:
    """Stands in for the coordinator: stores the publisher's address and ignores versions."""

    address: Any = None

    def set_publisher(self, address: Any) -> None:
        """Store the address."""
        self.address = address

    def publish_version(self, version: int) -> None:
        """Do nothing: no server waits for tickets here."""


class TrainerRank:
    """A rank with its shards of the model. Method `answer_X` answers the request X."""

    def __init__(self, rank: int, ranks: int, layers: int, folder: Path) -> None:
        from trainer.platform import select_platform

        config = _make_config(ranks, folder)
        platform = select_platform("cpu")
        platform.activate(config.trainer)
        import torch
        import torch.distributed as dist
        from transformers import Qwen2Config

        from trainer.model.builder import build_model
        from trainer.model.hf_weights import gather_positions
        from trainer.model.policy import Policy
        from trainer.model.shards import assign_shards
        from trainer.ranks.distributed import lay_out
        from trainer.weights import WeightExporter

        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "ranks"), ranks), rank=rank, world_size=ranks)
        lay_out(config.trainer, config.seed)

        # Qwen2.5-1.5B, with `layers` of its 28 layers.
        hf = Qwen2Config(
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=layers,
            num_attention_heads=12,
            num_key_value_heads=2,
            vocab_size=151_936,
            tie_word_embeddings=True,
        )
        model = build_model(hf, platform, torch.bfloat16, config.trainer)
        unused: Any = None  # the wrapped model and the optimizer, which publishing does not use
        self._policy = Policy(hf, model, unused, unused, 0.0, 1.0)
        self._board = AddressBoard()
        self._exporter = WeightExporter(self._policy, config, self._board, epoch=1)  # type: ignore[arg-type]
        self._bits = [parameter.data.view(-1).view(torch.int16) for parameter in model.parameters()]
        self._run = config.name_with_digest

        parameters = dict(model.named_parameters())
        shape = shape_of(hf)
        self._shard_bytes = 0
        for shard in assign_shards(hf, gather_positions(), range(ranks))[rank]:
            for view in shard.parameter_views(parameters, shape):
                self._shard_bytes += view.nbytes
        piece_bytes = min(self._shard_bytes, PIECE_BYTES)
        self._source = np.ones(piece_bytes, np.uint8)
        self._target = np.zeros(piece_bytes, np.uint8)

    async def answer_touch(self) -> None:
        """Change every value."""
        for bits in self._bits:
            bits.bitwise_xor_(1)

    async def answer_memcpy(self) -> float:
        """Return the seconds of a memcpy of as many bytes as this rank's shards have."""
        started_s = time.monotonic()
        remaining = self._shard_bytes
        while remaining > 0:
            size = min(remaining, len(self._target))
            np.copyto(self._target[:size], self._source[:size])
            remaining -= size
        return time.monotonic() - started_s

    async def answer_publish(self, version: int) -> dict[str, Any]:
        """Publish a version. Returns the stall of training, and the seconds until the shards are copied."""
        started_s = time.monotonic()
        self._exporter.publish_weights(version)
        stall_s = time.monotonic() - started_s
        self._policy.reading.wait_until_read()
        copied_s = time.monotonic() - started_s

        address = None  # only rank zero has a publisher
        if self._board.address is not None:
            published = self._board.address
            address = [published.epoch, published.announce, published.requests]
        return {"stall_s": stall_s, "copied_s": copied_s, "address": address, "run": self._run}

    async def close(self) -> None:
        """Stop the publisher."""
        self._exporter.close()


class CopyingEngine:
    """An engine that only copies the weights into its memory."""

    def __init__(self) -> None:
        self._reader = SourceReader()
        self._memory: dict[str, np.ndarray[Any, Any]] = {}

    async def answer_load(self, path: str, version: int) -> float:
        """Copy the tensors of the version. Returns the seconds that it took."""
        weights = self._reader.open(HeldWeights.in_store(Path(path), epoch=1, version=version))
        if not self._memory:
            self._memory = {spec.name: np.zeros(spec.nbytes, np.uint8) for spec in weights.layout.tensors}
        started_s = time.monotonic()
        for spec, tensor in weights:
            self._memory[spec.name][:] = np.frombuffer(tensor, np.uint8)
        weights.verify()
        return time.monotonic() - started_s

    async def close(self) -> None:
        """Do nothing: there are no resources to release."""


def _make_config(ranks: int, folder: Path) -> Any:
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
    """Serve requests as an engine or as a rank, until standard input is closed."""
    server = LineServer()
    if sys.argv[1] == ENGINE:
        asyncio.run(server.serve(CopyingEngine()))
        return
    rank, ranks, layers, folder = sys.argv[1:]
    asyncio.run(server.serve(TrainerRank(int(rank), int(ranks), int(layers), Path(folder))))


if __name__ == "__main__":
    main()
