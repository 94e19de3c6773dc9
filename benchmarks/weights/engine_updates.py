"""Updates of a real engine that generates meanwhile, in their three parts, beside a checkpoint folder.

    ours       copy into the store | transfer: the engine generates | pause: stop, load, resume
    baseline   save a safetensors folder: the engine generates      | pause: stop, vLLM's `reload_weights`, resume

Both bring the same new values of all tensors into one engine, one after the other in alternating order, with the same
requests in flight. After every update, the engine is asked for tensors that are not the new ones: there must be none.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from async_grpo.config.model import TinyQwen2Config
from async_grpo.config.rollout import RolloutConfig, VllmConfig
from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import EngineError, WaitTimeout
from async_grpo.lab.bench.measure import Measurement, Step, paired_rounds
from async_grpo.lab.bench.rollout.workload import number_model
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.store import WeightStore
from benchmarks.weights.baselines import WAIT_S
from benchmarks.weights.plane import DTYPE, WARM_UPS, BenchPlane, Weights, bench_plane
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.vllm.engine import VllmEngine

IN_FLIGHT = 16
VOCABULARY = 4096
PROMPT_TOKENS, MAX_TOKENS = 32, 256
DENSE = WeightsConfig(encoding="dense")
EnginePlatform = Literal["cpu", "cuda", "ascend", "none"]
FOLDER = "a safetensors folder, then vLLM's reload_weights"


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """Seconds of one update."""

    transfer_s: float
    """The engine generates meanwhile."""
    pause_s: float
    load_s: float
    """The part of the pause in which the weights are loaded."""
    total_s: float
    """From the trainer's call until the engine generates with the new weights."""


async def update_engine(
    size: TinyQwen2Config, platform: Literal["cpu", "cuda", "ascend"], rounds: int, step: Step
) -> list[Measurement]:
    """Medians of `rounds` pairs of updates. Raises EngineError, WeightsError, WaitTimeout, DependencyError."""
    vllm = VllmConfig(
        platform=platform,
        max_model_len=PROMPT_TOKENS + MAX_TOKENS,
        kv_cache_bytes=256 << 20,
        extra={"use_tqdm_on_load": False},  # it would draw a bar for every reload of the baseline
    )
    async with _bench(size, RolloutConfig(max_concurrency=IN_FLIGHT, vllm=vllm)) as bench:
        pairs = await paired_rounds(bench.through_the_plane, bench.through_a_folder, WARM_UPS + rounds, step)
        megabytes = bench.weights.layout.total_bytes / 1e6
    return _figures(megabytes, pairs[WARM_UPS:])


class EngineUpdateBench:
    """A started engine, the weights that it gets, and both ways to it."""

    def __init__(self, engine: VllmEngine, plane: BenchPlane, weights: Weights, folder: Path) -> None:
        self.weights = weights
        self._engine = engine
        self._plane = plane
        self._folder = folder
        self._expected = WeightStore.create(plane.publisher.store.with_name("expected"), weights.layout, slots=1)
        self._first = weights.flat.view(np.uint16).copy()
        self._changes = 0
        self._requests = 0

    async def through_the_plane(self) -> EngineUpdate:
        """One update as in a run: publish, receive, load."""
        self._change_all()
        await self._wait_for_requests()
        receiver = self._plane.receivers[0]
        started_s = time.monotonic()
        await self._plane.transfer(self.weights)
        async with receiver.hold_newest() as held:
            times = await self._engine.update_weights(held, interruption="keep")
        total_s = time.monotonic() - started_s
        await self._check_weights()
        return EngineUpdate(receiver.last_transfer_s, times.pause_s, times.load_s, total_s)

    async def through_a_folder(self) -> EngineUpdate:
        """One update without the weight plane: save a checkpoint folder, and have vLLM read it."""
        self._change_all()
        await self._wait_for_requests()
        llm = self._engine.async_llm
        started_s = time.monotonic()
        await asyncio.to_thread(self._save)
        paused_s = time.monotonic()
        await llm.pause_generation(mode="keep", clear_cache=False)
        load_s = time.monotonic()
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._folder)})
        loaded_s = time.monotonic()
        await llm.resume_generation()
        ended_s = time.monotonic()
        await self._check_weights()
        return EngineUpdate(paused_s - started_s, ended_s - paused_s, loaded_s - load_s, ended_s - started_s)

    async def keep_generating(self) -> None:
        """Have IN_FLIGHT requests in the engine until this is cancelled."""
        async with asyncio.TaskGroup() as loops:
            for seed in range(IN_FLIGHT):
                loops.create_task(self._generate_on(seed))

    async def _generate_on(self, seed: int) -> None:
        prompts = np.random.default_rng(seed)
        while True:
            self._requests += 1
            prompt = prompts.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
            await self._engine.generate(GenerationRequest(f"update-{self._requests}", prompt, MAX_TOKENS, seed=seed))

    async def _wait_for_requests(self) -> None:
        """Return once every request has a token: an engine that does nothing stops faster. Raises WaitTimeout."""
        deadline_s = time.monotonic() + WAIT_S
        while self._engine.load().running < IN_FLIGHT:
            if time.monotonic() > deadline_s:
                raise WaitTimeout(f"{IN_FLIGHT} requests of the bench to be under way", WAIT_S)
            await asyncio.sleep(0.01)

    def _change_all(self) -> None:
        """Change the last bits of every value, to others than in the update before."""
        self._changes += 1
        self.weights.flat.view(np.uint16)[:] = self._first ^ np.uint16(self._changes % 4)

    def _save(self) -> None:
        import torch
        from safetensors.torch import save_file

        flat = torch.from_numpy(self.weights.flat)
        tensors = {
            spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(torch.bfloat16).reshape(spec.shape)
            for spec in self.weights.layout.tensors
        }
        save_file(tensors, self._folder / "model.safetensors")

    async def _check_weights(self) -> None:
        """Raise EngineError unless the engine multiplies with the weights of this update."""
        np.frombuffer(self._expected.begin_write(), np.uint8)[:] = self.weights.flat
        self._expected.commit_write(WeightVersion(0, self._changes))
        held = HeldWeights.in_store(self._expected.path, epoch=0, version=self._changes)
        order = msgspec.json.encode(held).decode()
        [names] = await self._engine.async_llm.collective_rpc("differing_weights", args=(order,))
        if names:
            raise EngineError(f"{len(names)} tensors of the engine are old after an update: its time means nothing")


@asynccontextmanager
async def _bench(size: TinyQwen2Config, config: RolloutConfig) -> AsyncIterator[EngineUpdateBench]:
    """An engine that generates, and the plane. Processes, stores and files are gone afterwards."""
    import torch

    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as name:
        model_dir, folder = Path(name) / "model", Path(name) / "saved"
        folder.mkdir()
        model = number_model(model_dir, size, VOCABULARY, DTYPE)
        tensors = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
        weights = Weights(make_layout((key, DTYPE, list(value.shape)) for key, value in tensors.items()))
        block = weights.flat.view(np.uint16)
        block[:] = 0
        for spec in weights.layout.tensors:
            values = tensors[spec.name].reshape(-1).view(torch.uint16).numpy()
            block[spec.offset // 2 : (spec.offset + spec.nbytes) // 2] = values
        engine = VllmEngine(model_dir, config, precision=DTYPE, seed=1, name="bench")
        async with bench_plane("engine", weights.layout, DENSE, 1) as plane:
            try:
                await engine.start()
                bench = EngineUpdateBench(engine, plane, weights, folder)
                async with asyncio.TaskGroup() as group:
                    generating = group.create_task(bench.keep_generating())
                    yield bench
                    generating.cancel()
            finally:
                await engine.aclose()
                os.environ.clear()  # the engine's variables, such as OMP_NUM_THREADS, are not for the next figures
                os.environ.update(environment)


def _figures(megabytes: float, pairs: list[tuple[EngineUpdate, EngineUpdate]]) -> list[Measurement]:
    name = f"an engine with {IN_FLIGHT} requests in flight, {megabytes:.0f} MB"

    def figure(what: str, part: str) -> Measurement:
        milliseconds = [(1e3 * getattr(ours, part), 1e3 * getattr(theirs, part)) for ours, theirs in pairs]
        return Measurement.paired(f"{name}: {what}", "ms", milliseconds, FOLDER)

    return [
        figure("update, from publish until it generates again", "total_s"),
        figure("of it, transfer", "transfer_s"),
        figure("of it, pause", "pause_s"),
        figure("of the pause, load", "load_s"),
    ]
