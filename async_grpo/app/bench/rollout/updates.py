"""What weight updates cost an engine that keeps generating, and whether any request suffers.

    streams (as many as `concurrency`) --> engine.generate, one request after another
    in every other window, `interval_s` apart: next version into the store --> engine.update_weights

Windows with a few updates and without alternate while the streams never stop. The ratio is the median of those of
neighbouring windows, so that a machine that gets slower or faster evens out. Every request must end at its own
max_tokens, with version spans that cover it and that agree with vLLM's own, where it reports them.

The weights come from MovingWeights: a tiny random checkpoint, and a store whose weights change like a trainer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from async_grpo.app.bench.measure import Measurement
from async_grpo.config.rollout import VllmConfig
from async_grpo.errors import EngineError
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion, layout_of
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.store import WeightStore
from rollout_server.engines.base import Engine, Generation, GenerationRequest, Interruption
from rollout_server.engines.vllm.engine import VllmEngine

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

CHANGED_FRACTION = 0.01
"""Of all bfloat16 values, by one step of an optimizer at a learning rate of 1e-6."""


@dataclass(frozen=True, slots=True)
class BenchModelSize:
    """Of a Qwen2 without a stop token: every request ends at its own max_tokens."""

    hidden_size: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    intermediate_size: int = 704
    vocab_size: int = 4096


class MovingWeights:
    """Version after version of a random bfloat16 policy, in a store at `path`."""

    def __init__(self, size: BenchModelSize, folder: Path, path: Path, *, seed: int) -> None:
        """Writes the checkpoint to `folder` and makes the store, still empty."""
        import torch

        model = _random_qwen2(size, seed).to(torch.bfloat16)
        model.save_pretrained(folder)
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        self.store = WeightStore.create(path, layout_of([(n, "bfloat16", list(t.shape)) for n, t in tensors.items()]))
        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        self._items = np.zeros(self.store.layout.total_bytes // 2, np.uint16)
        for spec in self.store.layout.tensors:
            part = self._items[spec.offset // 2 : (spec.offset + spec.nbytes) // 2]
            part[:] = tensors[spec.name].reshape(-1).view(torch.uint16).numpy()
        self._random = np.random.default_rng(seed)
        self._version = -1

    def step(self) -> WeightVersion:
        """Move some of the values to their neighbour and publish that as the next version."""
        moved = self._random.integers(0, len(self._items), int(CHANGED_FRACTION * len(self._items)))
        self._items[moved] ^= 1
        self._version += 1
        np.frombuffer(self.store.begin(), np.uint16)[:] = self._items
        identity = WeightVersion(0, self._version)
        self.store.commit(identity)
        return identity


def _random_qwen2(size: BenchModelSize, seed: int) -> Qwen2ForCausalLM:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


_WARM_UP_S = 3.0
_END_TIMEOUT_S = 120.0


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
    model: BenchModelSize = field(default_factory=BenchModelSize)
    seed: int = 1

    @property
    def pairs(self) -> int:
        """Of windows without and with updates."""
        return max(1, round(self.seconds / (self.updates_a_window * self.interval_s)))


@dataclass(slots=True)
class UpdateTotals:
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


async def measure_updates(bench: UpdateBench, step: Callable[[], None] = lambda: None) -> list[Measurement]:
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
) -> list[Measurement]:
    totals = UpdateTotals()
    pairs: list[dict[bool, float]] = []
    async with _traffic(bench, engine, totals):
        await _update(bench, engine, weights)  # the first one maps the store
        await asyncio.sleep(_WARM_UP_S)
        for index in range(bench.pairs):
            order = (False, True) if index % 2 == 0 else (True, False)
            pairs.append({updates: await _window(bench, engine, weights, totals, updates) for updates in order})
            step()
    return _figures(bench, engine, weights, totals, pairs)


async def _window(
    bench: UpdateBench, engine: VllmEngine, weights: MovingWeights, totals: UpdateTotals, with_updates: bool
) -> float:
    """Tokens a second. Every interval of the window begins with an update, if there are any."""
    started, before = time.monotonic(), engine.load().generated_tokens
    for index in range(bench.updates_a_window):
        if with_updates:
            totals.pauses_s.append(await _update(bench, engine, weights))
        await asyncio.sleep(max(0.0, started + (index + 1) * bench.interval_s - time.monotonic()))
    return (engine.load().generated_tokens - before) / (time.monotonic() - started)


@contextlib.asynccontextmanager
async def _traffic(bench: UpdateBench, engine: Engine, totals: UpdateTotals) -> AsyncIterator[None]:
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
            totals.add(request, await engine.generate(request))

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(index)) for index in range(bench.concurrency)]
        yield
        ended.set()
        _, lost = await asyncio.wait(streams, timeout=_END_TIMEOUT_S)
        if lost:
            raise EngineError(f"{len(lost)} requests were lost: they did not end within {_END_TIMEOUT_S:g} s.")


async def _update(bench: UpdateBench, engine: VllmEngine, weights: MovingWeights) -> float:
    identity = await asyncio.to_thread(weights.step)
    held = HeldWeights.in_store(weights.store.path, epoch=identity.epoch, version=identity.version)
    return await engine.update_weights(held, interruption=bench.interruption)


def _spans_are_exact(generation: Generation) -> bool:
    edges = [0, *(span.end for span in generation.spans)]
    starts = [span.start for span in generation.spans]
    versions = [span.version for span in generation.spans]
    return starts == edges[:-1] and edges[-1] == len(generation.tokens) and versions == sorted(set(versions))


def _figures(
    bench: UpdateBench, engine: VllmEngine, weights: MovingWeights, totals: UpdateTotals, pairs: list[dict[bool, float]]
) -> list[Measurement]:
    pauses_ms = 1e3 * np.asarray(totals.pauses_s)
    return [
        Measurement(
            f"generation, {bench.concurrency} in flight, an update every {bench.interval_s:g} s ({bench.interruption})",
            float(np.median([pair[True] for pair in pairs])),
            "tokens/s",
            float(np.median([pair[False] for pair in pairs])),
            "without updates",
            float(np.median([pair[True] / pair[False] for pair in pairs])),
        ),
        Measurement("pause of an update, median", float(np.median(pauses_ms)), "ms"),
        Measurement("pause of an update, longest", float(pauses_ms.max()), "ms"),
        Measurement("updates", len(pauses_ms), "updates"),
        Measurement("parameters", weights.parameters, "parameters"),
        Measurement("requests", totals.requests, "requests"),
        Measurement("requests across updates", totals.across_updates, "requests"),
        Measurement("requests cut short", totals.cut, "requests"),
        Measurement("requests with inexact spans", totals.wrong_spans, "requests"),
        Measurement("requests whose spans vLLM disputes", engine.disputed_spans, "requests"),
    ]
