"""What weight updates cost an engine that goes on generating, and whether any request suffers.

    streams (as many as `concurrency`) --> engine.generate, one request after another
    in every other window, `interval_s` apart: next version into the store --> engine.update_weights

Windows with a few updates and without alternate while the streams never stop; the ratio is the median
of those of neighbours, so that a machine that gets slower or faster evens out. Every request must end
at its own max_tokens, with version spans that cover it and that vLLM, where it reports spans, agrees
with.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from async_grpo.config.rollout import VllmConfig
from async_grpo.errors import EngineError
from async_grpo.weights.store import remove_stores, store_path
from rollout_server.bench.moving_weights import ModelSize, MovingWeights
from rollout_server.engines.protocol import Engine, Generation, GenerationRequest, Interruption
from rollout_server.engines.vllm_engine import VllmEngine

_WARM_UP_S = 3.0
_END_TIMEOUT_S = 120.0


class Measured(NamedTuple):
    """One figure with its baseline from the same run; `ratio` is the median of pairs."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class UpdateBench:
    """How much is measured. `seconds` is spent in windows with updates, and as much in windows without."""

    seconds: float = 60.0
    interval_s: float = 2.0
    updates_a_window: int = 3
    concurrency: int = 64
    max_tokens: tuple[int, int] = (128, 384)
    """Each request's is drawn from here."""
    interruption: Interruption = "keep"
    model: ModelSize = field(default_factory=ModelSize)
    seed: int = 1

    @property
    def pairs(self) -> int:
        """Of windows without and with updates."""
        return max(1, round(self.seconds / (self.updates_a_window * self.interval_s)))


@dataclass(slots=True)
class Tally:
    """What the streams and the updater have seen."""

    requests: int = 0
    cut: int = 0
    """Requests that ended before their max_tokens."""
    wrong_spans: int = 0
    """Requests whose spans do not cover their tokens in ascending order."""
    across_updates: int = 0
    """Requests with tokens of several versions."""
    pauses_s: list[float] = field(default_factory=list)

    def add(self, request: GenerationRequest, generation: Generation) -> None:
        """Judge one finished request."""
        self.requests += 1
        self.cut += len(generation.tokens) != request.max_tokens or generation.finish_reason != "length"
        self.wrong_spans += not _spans_are_exact(generation)
        self.across_updates += len(generation.spans) > 1


async def measure_updates(bench: UpdateBench, step: Callable[[], None] = lambda: None) -> list[Measured]:
    """Figures of a real vLLM engine in processes of its own; `step` is called after each pair of windows.

    Starts those with the spawn method, see `VllmEngine.start`. Raises EngineError, also if a request was
    lost, that is raised or did not end.
    """
    run = f"bench-updates-{time.time_ns()}"
    try:
        with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
            weights = MovingWeights(bench.model, Path(folder), store_path(run, "weights"), seed=bench.seed)
            config = VllmConfig(max_model_len=64 + bench.max_tokens[1], kv_cache_bytes=512 << 20)
            engine = VllmEngine(Path(folder), config, precision="bfloat16", seed=bench.seed, name="bench")
            await engine.start()
            try:
                return await _measure(bench, engine, weights, step)
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            finally:
                await engine.aclose()
    finally:
        remove_stores(run)


async def _measure(
    bench: UpdateBench, engine: VllmEngine, weights: MovingWeights, step: Callable[[], None]
) -> list[Measured]:
    tally = Tally()
    pairs: list[dict[bool, float]] = []
    async with _traffic(bench, engine, tally):
        await _update(bench, engine, weights)  # the first one maps the store
        await asyncio.sleep(_WARM_UP_S)
        for index in range(bench.pairs):
            order = (False, True) if index % 2 == 0 else (True, False)
            pairs.append({updates: await _window(bench, engine, weights, tally, updates) for updates in order})
            step()
    return _figures(bench, engine, weights, tally, pairs)


async def _window(
    bench: UpdateBench, engine: VllmEngine, weights: MovingWeights, tally: Tally, with_updates: bool
) -> float:
    """Tokens a second. Every interval of the window begins with an update, if there are any."""
    started, before = time.monotonic(), engine.load().generated_tokens
    for index in range(bench.updates_a_window):
        if with_updates:
            tally.pauses_s.append(await _update(bench, engine, weights))
        await asyncio.sleep(max(0.0, started + (index + 1) * bench.interval_s - time.monotonic()))
    return (engine.load().generated_tokens - before) / (time.monotonic() - started)


@contextlib.asynccontextmanager
async def _traffic(bench: UpdateBench, engine: Engine, tally: Tally) -> AsyncIterator[None]:
    """`concurrency` requests in flight for the length of the block, and then until the last has ended."""
    ended = asyncio.Event()

    async def stream(index: int) -> None:
        random = np.random.default_rng([bench.seed, index])
        count = 0
        while not ended.is_set():
            count += 1
            request = GenerationRequest(
                f"{index}-{count}",
                prompt=random.integers(0, bench.model.vocab_size, 16).tolist(),
                max_tokens=int(random.integers(bench.max_tokens[0], bench.max_tokens[1] + 1)),
            )
            tally.add(request, await engine.generate(request))

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(index)) for index in range(bench.concurrency)]
        yield
        ended.set()
        _, lost = await asyncio.wait(streams, timeout=_END_TIMEOUT_S)
        if lost:
            raise EngineError(f"{len(lost)} requests were lost: they did not end within {_END_TIMEOUT_S:g} s.")


async def _update(bench: UpdateBench, engine: VllmEngine, weights: MovingWeights) -> float:
    identity = await asyncio.to_thread(weights.step)
    return await engine.update_weights(
        weights.store.path, epoch=identity.epoch, version=identity.version, interruption=bench.interruption
    )


def _spans_are_exact(generation: Generation) -> bool:
    edges = [0, *(span.end for span in generation.spans)]
    starts = [span.start for span in generation.spans]
    versions = [span.version for span in generation.spans]
    return starts == edges[:-1] and edges[-1] == len(generation.tokens) and versions == sorted(set(versions))


def _figures(
    bench: UpdateBench, engine: VllmEngine, weights: MovingWeights, tally: Tally, pairs: list[dict[bool, float]]
) -> list[Measured]:
    pauses_ms = 1e3 * np.asarray(tally.pauses_s)
    return [
        Measured(
            f"generation, {bench.concurrency} in flight, an update every {bench.interval_s:g} s ({bench.interruption})",
            float(np.median([pair[True] for pair in pairs])),
            "tokens/s",
            float(np.median([pair[False] for pair in pairs])),
            "without updates",
            float(np.median([pair[True] / pair[False] for pair in pairs])),
        ),
        Measured("pause of an update, median", float(np.median(pauses_ms)), "ms"),
        Measured("pause of an update, longest", float(pauses_ms.max()), "ms"),
        Measured("updates", len(pauses_ms), "updates"),
        Measured("parameters", weights.parameters, "parameters"),
        Measured("requests", tally.requests, "requests"),
        Measured("requests across updates", tally.across_updates, "requests"),
        Measured("requests cut short", tally.cut, "requests"),
        Measured("requests with inexact spans", tally.wrong_spans, "requests"),
        Measured("requests whose spans vLLM disputes", engine.disputed_spans, "requests"),
    ]
