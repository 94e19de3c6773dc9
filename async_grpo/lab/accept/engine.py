"""The engine's program of `async-grpo accept`: the engine of a run and the receiver that a rollout server uses.

    python -m async_grpo.lab.accept.engine --config FILE --model FOLDER      serves requests, one per line

It is a separate process because engine and trainer set up the platform in incompatible ways.
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
from async_grpo.lab.bench.rig import LineServer
from async_grpo.weights import make_receiver
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.source_reader import SourceReader
from async_grpo.wire import decode
from async_grpo.wire.board import PublisherAddress
from rollout_server.assembly import start_engine
from rollout_server.engines.base import GenerationRequest

NAME = "accept"
UPDATE_TIMEOUT_S = 120.0
BEFORE_FIRST_VERSION = WeightVersion(-1, -1)
"""Older than every published version."""
STALE_LAYER = "rollout_server.engines.vllm.stale_layer.StaleLayer"
"""Import path: the class can only be imported in vLLM's worker."""


def main() -> None:
    """Run the program; see the module."""
    parser = argparse.ArgumentParser(prog="async_grpo.lab.accept.engine", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    server = LineServer()  # claims standard output before vLLM prints to it
    asyncio.run(server.serve(EngineSide(load(arguments.config), arguments.model)))


class EngineSide:
    """The engine with the small model. Method `answer_X` handles request X."""

    def __init__(self, config: RunConfig, model: Path) -> None:
        self._config = config
        self._model = model
        self._stack = AsyncExitStack()
        self._engine: Any = None
        self._proof: dict[str, Any] = {}
        self._address: PublisherAddress | None = None
        self._receiver: Any = None
        self._loaded = BEFORE_FIRST_VERSION
        self._request_count = 0

    async def answer_start(self) -> dict[str, Any]:
        """Start the engine as a server does, if it is not running; return its check of log-probabilities."""
        if self._engine is None:
            self._engine, proof = await start_engine(self._stack, self._config, self._model, NAME)
            if proof is not None:
                self._proof = asdict(proof)
        return self._proof

    async def answer_graphs(self, planted: bool) -> dict[str, Any]:
        """Start and stop an engine with captured graphs; return its note and the result of its update check.

        `planted` adds a layer that graphs do not follow.
        """
        vllm = self._config.rollout.vllm
        extra = {**vllm.extra}
        if planted:
            extra["worker_extension_cls"] = STALE_LAYER
        if vllm.platform == "cpu":  # the CPU captures nothing, but would still compile for a minute
            extra["compilation_config"] = {"mode": 0}
        changed_vllm = vllm.model_copy(update={"enforce_eager": False, "extra": extra})
        rollout = self._config.rollout.model_copy(update={"vllm": changed_vllm})
        config = self._config.model_copy(update={"rollout": rollout})

        async with AsyncExitStack() as stack:
            engine: Any
            engine, _ = await start_engine(stack, config, self._model, NAME)
            check = engine.update_check
            return {"note": engine.note, "check": None if check is None else asdict(check)}

    async def answer_generate(
        self, prompts: list[list[int]], max_tokens: int, temperature: float
    ) -> list[dict[str, Any]]:
        """Return one completion per prompt."""
        await self.answer_start()
        self._request_count += len(prompts)  # the engine rejects a request id that is in use
        requests = [
            GenerationRequest(f"{NAME}-{self._request_count}-{index}", prompt, max_tokens, temperature)
            for index, prompt in enumerate(prompts)
        ]
        completions = await asyncio.gather(*(self._engine.generate(request) for request in requests))
        return [
            {"prompt": prompt, "tokens": completion.tokens.tolist(), "logprobs": completion.logprobs.tolist()}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    async def answer_receive(self, address: str) -> dict[str, float]:
        """Wait for a newer version, load it and return the seconds of each phase.

        `held_s` is until the receiver has the version, `seconds` until the engine has loaded it.
        """
        self._address = decode(bytes.fromhex(address), PublisherAddress)
        if self._receiver is None:
            self._receiver = make_receiver(self._config, self._resolve_address, name=NAME)
            self._stack.push_async_callback(self._receiver.close)

        started_s = time.monotonic()
        await self._receiver.wait_for_newer_version(self._loaded, UPDATE_TIMEOUT_S)
        received_s = time.monotonic() - started_s
        async with self._receiver.hold_newest() as weights:
            times = await self._engine.update_weights(weights, interruption="keep")
            self._loaded = weights.identity
        seconds = time.monotonic() - started_s
        return {
            "held_s": received_s,
            "transfer_s": self._receiver.last_transfer_s,
            "pause_s": times.pause_s,
            "load_s": times.load_s,
            "seconds": seconds,
        }

    async def answer_weights(self) -> dict[str, Any]:
        """Return the digest of every received tensor, and the tensors that the engine does not multiply with."""
        async with self._receiver.hold_newest() as weights:
            digests = {spec.name: xxhash.xxh3_64_hexdigest(data) for spec, data in SourceReader().open(weights)}
            order = msgspec.json.encode(weights).decode()
            names_by_worker = await self._engine.async_llm.collective_rpc("differing_weights", args=(order,))

        differing: set[str] = set()
        for names in names_by_worker:
            differing.update(names)
        return {"digests": digests, "differing": sorted(differing)}

    async def close(self) -> None:
        """Close the receiver and the engine."""
        await self._stack.aclose()

    async def _resolve_address(self) -> PublisherAddress | None:
        return self._address


if __name__ == "__main__":
    main()
