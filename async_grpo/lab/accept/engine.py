"""The engine's side of `async-grpo accept`: the engine of the run, and the receiver that its rollout server has.

    python -m async_grpo.lab.accept.engine --config FILE --model FOLDER      answers requests, line by line

It is a process of its own because the engine takes the platform in another way than the trainer does.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from async_grpo.config import RunConfig, load
from async_grpo.lab.bench.rig import AnswerLines
from async_grpo.weights import make_receiver
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.source_reader import SourceReader
from async_grpo.wire import decode
from async_grpo.wire.board import PublisherAddress
from rollout_server.assembly import start_engine
from rollout_server.engines.base import GenerationRequest

NAME = "accept"
UPDATE_TIMEOUT_S = 120.0
NOTHING = WeightVersion(-1, -1)
STALE_LAYER = "rollout_server.engines.vllm.stale_layer.StaleLayer"
"""Only vLLM's worker imports it."""


def main() -> None:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(prog="async_grpo.lab.accept.engine", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    lines = AnswerLines()
    asyncio.run(lines.serve(EngineSide(load(arguments.config), arguments.model)))


class EngineSide:
    """The engine with the small model. Every method `answer_X` answers the request X."""

    def __init__(self, config: RunConfig, model: Path) -> None:
        self._config, self._model = config, model
        self._stack = AsyncExitStack()
        self._engine: Any = None
        self._address: PublisherAddress | None = None
        self._receiver: Any = None
        self._seen = NOTHING
        self._requests = 0

    async def answer_start(self) -> dict[str, Any]:
        """Start the engine as a server does, once; returns the proof of its log-probabilities."""
        if self._engine is None:
            self._engine, proof = await start_engine(self._stack, self._config, self._model, NAME)
            self._proof = {} if proof is None else asdict(proof)
        return self._proof

    async def answer_graphs(self, planted: bool) -> dict[str, Any]:
        """Start and end an engine with captured graphs, `planted`: with a layer that they do not follow. Returns the
        engine's note, and what its check of updates has measured."""
        vllm = self._config.rollout.vllm
        changes: dict[str, Any] = {"enforce_eager": False}
        if planted:
            changes["extra"] = {**vllm.extra, "worker_extension_cls": STALE_LAYER}
        if vllm.platform == "cpu":  # which captures nothing, and would compile for a minute
            changes["extra"] = {**changes.get("extra", {}), "compilation_config": {"mode": 0}}
        rollout = self._config.rollout.model_copy(update={"vllm": vllm.model_copy(update=changes)})
        async with AsyncExitStack() as stack:
            config = self._config.model_copy(update={"rollout": rollout})
            engine: Any = (await start_engine(stack, config, self._model, NAME))[0]
            check = engine.update_check
            return {"note": engine.note, "check": None if check is None else asdict(check)}

    async def answer_generate(
        self, prompts: list[list[int]], max_tokens: int, temperature: float
    ) -> list[dict[str, Any]]:
        """A completion of each prompt."""
        await self.answer_start()
        self._requests += len(prompts)
        requests = [
            GenerationRequest(f"{NAME}-{self._requests}-{place}", prompt, max_tokens, temperature)
            for place, prompt in enumerate(prompts)
        ]
        made = await asyncio.gather(*(self._engine.generate(request) for request in requests))
        return [
            {"prompt": prompt, "tokens": one.tokens.tolist(), "logprobs": one.logprobs.tolist()}
            for prompt, one in zip(prompts, made, strict=True)
        ]

    async def answer_receive(self, address: str) -> dict[str, float]:
        """Wait until the receiver holds a newer version, and load it; the seconds of both, of the transfer,
        and of the engine's pause and load."""
        self._address = decode(bytes.fromhex(address), PublisherAddress)
        if self._receiver is None:
            self._receiver = make_receiver(self._config, self._resolve, name=NAME)
            self._stack.push_async_callback(self._receiver.close)
        started_s = time.monotonic()
        await self._receiver.wait_for_newer_version(self._seen, UPDATE_TIMEOUT_S)
        held_s = time.monotonic() - started_s
        async with self._receiver.hold_newest() as held:
            times = await self._engine.update_weights(held, interruption="keep")
            self._seen = held.identity
        seconds = time.monotonic() - started_s
        return {
            "held_s": held_s,
            "transfer_s": self._receiver.last_transfer_s,
            "pause_s": times.pause_s,
            "load_s": times.load_s,
            "seconds": seconds,
        }

    async def answer_weights(self) -> dict[str, Any]:
        """The digest of every tensor as it arrived, and the tensors with which the engine does not multiply."""
        async with self._receiver.hold_newest() as held:
            arrived = {spec.name: xxhash.xxh3_64_hexdigest(data) for spec, data in SourceReader().open(held)}
            order = msgspec.json.encode(held).decode()
            differing = await self._engine.async_llm.collective_rpc("differing_weights", args=(order,))
        return {"digests": arrived, "differing": sorted({name for names in differing for name in names})}

    async def close(self) -> None:
        """End the receiver and the engine."""
        await self._stack.aclose()

    async def _resolve(self) -> PublisherAddress | None:
        return self._address


if __name__ == "__main__":
    main()
