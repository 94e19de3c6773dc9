"""A trainer that trains nothing: publishes what it is told to, and says what that was.

    python -m tests.support.weight_writer RUN ADDRESS CONFIG MEGABYTES

It writes the publisher's address to the file ADDRESS. Each line on its input makes one version: `new` draws every byte
anew, `step` moves one bfloat16 in a hundred to a neighbour. One JSON line answers it as soon as `publish` returns.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.manifest import TensorLayout, make_layout
from async_grpo.weights.zmq.sender import ZmqWeightSender
from async_grpo.wire import encode
from async_grpo.wire.board import PublisherAddress
from tests.support.speech import Speech

TENSORS = 8
MOVED_SHARE = 0.01

Items = npt.NDArray[np.uint16]


def layout_for(megabytes: int) -> TensorLayout:
    return make_layout((f"tensor-{number}", "bfloat16", [megabytes << 19 >> 3]) for number in range(TENSORS))


def tell(path: Path, address: PublisherAddress) -> None:
    """Whole or not at all."""
    written = path.with_suffix(".new")
    written.write_bytes(encode(address))
    written.rename(path)


def move(weights: dict[str, Items], order: str, random: np.random.Generator) -> None:
    for items in weights.values():
        if order == "new":
            items[:] = random.integers(0, 1 << 16, len(items), np.uint16)
        else:
            places = random.choice(len(items), int(len(items) * MOVED_SHARE), replace=False)
            items[places] += random.choice(np.array([1, 0xFFFF], np.uint16), len(places))


def serve(run: str, address: Path, config: WeightsConfig, layout: TensorLayout) -> None:
    speech = Speech()
    random = np.random.default_rng(0)
    weights: dict[str, Items] = {spec.name: np.zeros(spec.shape[0], np.uint16) for spec in layout.tensors}
    with ZmqWeightSender(layout, run, 0, config) as publisher:
        tell(address, publisher.address)
        for version, order in enumerate(map(str.strip, sys.stdin)):
            move(weights, order, random)
            publisher.publish_weights(version, weights.items())
            hashes = {name: xxhash.xxh3_64_hexdigest(items) for name, items in weights.items()}
            speech.say({"version": version, "hashes": hashes})


if __name__ == "__main__":
    run, address, config, megabytes = sys.argv[1:]
    serve(run, Path(address), WeightsConfig.model_validate_json(config), layout_for(int(megabytes)))
