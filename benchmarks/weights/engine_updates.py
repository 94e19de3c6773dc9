"""Weight updates of a real engine under load, compared with reloading a checkpoint folder.

    ours       copy into the store | transfer: the engine generates | pause: stop, load, resume
    baseline   save a safetensors folder: the engine generates      | pause: stop, vLLM's `reload_weights`, resume

Both load the same new values of all tensors into one engine, in alternating order, with the same requests in flight.
After every update the engine's tensors are compared with the new values. A single stale tensor fails the bench.
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
from async_grpo.lab.bench.measure import Measurement, Step, measure_pairs
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
PROMPT_TOKENS = 32
MAX_TOKENS = 256
DENSE = WeightsConfig(encoding="dense")
EnginePlatform = Literal["cpu", "cuda", "ascend", "none"]
BASELINE_NAME = "a safetensors folder, then vLLM's reload_weights"


@dataclass(frozen=True, slots=True)
class MeasuredUpdate:
    """Durations of one update."""

    transfer_s: float
    """Time in which the new weights travel and the engine still generates."""
    pause_s: float
    load_s: float
    """Part of the pause in which the weights are loaded."""
    total_s: float
    """From the trainer's call until the engine generates with the new weights."""


async def update_engine(
    size: TinyQwen2Config, platform: Literal["cpu", "cuda", "ascend"], rounds: int, step: Step
) -> list[Measurement]:
    """Time `rounds` pairs of updates. Raises EngineError, WeightsError, WaitTimeout, DependencyError."""
    vllm = VllmConfig(
        platform=platform,
        max_model_len=PROMPT_TOKENS + MAX_TOKENS,
        kv_cache_bytes=256 << 20,
        extra={"use_tqdm_on_load": False},  # otherwise every reload of the baseline draws a progress bar
    )
    async with _start_bench(size, RolloutConfig(max_concurrency=IN_FLIGHT, vllm=vllm)) as bench:
        pairs = await measure_pairs(bench.update_from_store, bench.update_from_folder, WARM_UPS + rounds, step)
        megabytes = bench.weights.layout.total_bytes / 1e6
    return _make_measurements(megabytes, pairs[WARM_UPS:])


class EngineUpdateBench:
    """A started engine, its next weights, and both ways to load them."""

    def __init__(self, engine: VllmEngine, plane: BenchPlane, weights: Weights, folder: Path) -> None:
        self.weights = weights
        self._engine = engine
        self._plane = plane
        self._folder = folder
        self._expected = WeightStore.create(plane.publisher.store.with_name("expected"), weights.layout, slots=1)
        self._initial_bits = weights.flat.view(np.uint16).copy()
        self._changes = 0
        self._requests = 0

    async def update_from_store(self) -> MeasuredUpdate:
        """Do one update as in a run: publish, receive, load."""
        self._change_all_values()
        await self._wait_for_requests()

        receiver = self._plane.receivers[0]
        started_s = time.monotonic()
        await self._plane.transfer(self.weights)
        async with receiver.hold_newest() as weights:
            times = await self._engine.update_weights(weights, interruption="keep")
        total_s = time.monotonic() - started_s

        await self._check_weights()
        return MeasuredUpdate(receiver.last_transfer_s, times.pause_s, times.load_s, total_s)

    async def update_from_folder(self) -> MeasuredUpdate:
        """Do one update without the weight plane: save a checkpoint folder and have vLLM read it."""
        self._change_all_values()
        await self._wait_for_requests()

        llm = self._engine.async_llm
        started_s = time.monotonic()
        await asyncio.to_thread(self._save_folder)

        paused_s = time.monotonic()
        await llm.pause_generation(mode="keep", clear_cache=False)
        load_started_s = time.monotonic()
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._folder)})
        loaded_s = time.monotonic()
        await llm.resume_generation()
        ended_s = time.monotonic()

        await self._check_weights()
        return MeasuredUpdate(
            transfer_s=paused_s - started_s,
            pause_s=ended_s - paused_s,
            load_s=loaded_s - load_started_s,
            total_s=ended_s - started_s,
        )

    async def keep_generating(self) -> None:
        """Keep IN_FLIGHT requests in the engine until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for seed in range(IN_FLIGHT):
                tasks.create_task(self._generate_repeatedly(seed))

    async def _generate_repeatedly(self, seed: int) -> None:
        prompts = np.random.default_rng(seed)
        while True:
            self._requests += 1
            prompt = prompts.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
            await self._engine.generate(GenerationRequest(f"update-{self._requests}", prompt, MAX_TOKENS, seed=seed))

    async def _wait_for_requests(self) -> None:
        """Wait until every request is running. Raises WaitTimeout.

        An idle engine pauses faster, so an update during the change of requests would look too good.
        """
        deadline_s = time.monotonic() + WAIT_S
        while self._engine.load().running < IN_FLIGHT:
            if time.monotonic() > deadline_s:
                raise WaitTimeout(f"{IN_FLIGHT} requests of the bench to run", WAIT_S)
            await asyncio.sleep(0.01)

    def _change_all_values(self) -> None:
        """Change the last two bits of every value, so that it differs from the previous update."""
        self._changes += 1
        self.weights.flat.view(np.uint16)[:] = self._initial_bits ^ np.uint16(self._changes % 4)

    def _save_folder(self) -> None:
        import torch
        from safetensors.torch import save_file

        flat = torch.from_numpy(self.weights.flat)
        tensors = {
            spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(torch.bfloat16).reshape(spec.shape)
            for spec in self.weights.layout.tensors
        }
        save_file(tensors, self._folder / "model.safetensors")

    async def _check_weights(self) -> None:
        """Raise EngineError unless the engine computes with the weights of this update."""
        np.frombuffer(self._expected.begin_write(), np.uint8)[:] = self.weights.flat
        self._expected.commit_write(WeightVersion(0, self._changes))
        expected = HeldWeights.in_store(self._expected.path, epoch=0, version=self._changes)
        message = msgspec.json.encode(expected).decode()
        [names] = await self._engine.async_llm.collective_rpc("differing_weights", args=(message,))
        if names:
            raise EngineError(
                f"{len(names)} tensors of the engine still have old values after an update, so its time means nothing"
            )


@asynccontextmanager
async def _start_bench(size: TinyQwen2Config, config: RolloutConfig) -> AsyncIterator[EngineUpdateBench]:
    """Start a generating engine and the weight plane. Removes all processes, stores and files."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as name:
        model_dir = Path(name) / "model"
        folder = Path(name) / "saved"
        folder.mkdir()
        weights = _make_model(model_dir, size)
        engine = VllmEngine(model_dir, config, precision=DTYPE, seed=1, name="bench")

        async with bench_plane("engine", weights.layout, DENSE, 1) as plane:
            try:
                await engine.start()
                bench = EngineUpdateBench(engine, plane, weights, folder)
                async with asyncio.TaskGroup() as tasks:
                    generation = tasks.create_task(bench.keep_generating())
                    yield bench
                    generation.cancel()
            finally:
                await engine.aclose()
                # The engine sets variables such as OMP_NUM_THREADS, which would slow the measurements after this one.
                os.environ.clear()
                os.environ.update(environment)


def _make_model(folder: Path, size: TinyQwen2Config) -> Weights:
    """Write a model to `folder` and return its values, without the output matrix, which is tied to the embedding."""
    import torch

    model = number_model(folder, size, VOCABULARY, DTYPE)
    tensors = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    weights = Weights(make_layout((key, DTYPE, list(value.shape)) for key, value in tensors.items()))

    bits = weights.flat.view(np.uint16)
    bits[:] = 0
    for spec in weights.layout.tensors:
        values = tensors[spec.name].reshape(-1).view(torch.uint16).numpy()
        bits[spec.offset // 2 : (spec.offset + spec.nbytes) // 2] = values
    return weights


def _make_measurements(megabytes: float, pairs: list[tuple[MeasuredUpdate, MeasuredUpdate]]) -> list[Measurement]:
    """Compare both sides of `pairs` in the total and in each part."""
    setup = f"an engine with {IN_FLIGHT} requests in flight, {megabytes:.0f} MB"
    parts = {
        "total_s": "update, from publish until it generates again",
        "transfer_s": "of it, transfer",
        "pause_s": "of it, pause",
        "load_s": "of the pause, load",
    }
    measurements = []
    for field, title in parts.items():
        milliseconds = [(1e3 * getattr(ours, field), 1e3 * getattr(baseline, field)) for ours, baseline in pairs]
        measurements.append(Measurement.paired(f"{setup}: {title}", "ms", milliseconds, BASELINE_NAME))
    return measurements
