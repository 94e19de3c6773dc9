"""Engines with adapters: merged ones multiply with the exact sum with the checkpoint, the others with both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from transformers import DynamicCache

from async_grpo.config.model import LoraConfig
from async_grpo.config.rollout import RolloutConfig, VllmConfig
from async_grpo.errors import WeightsCorrupt
from async_grpo.weights.base import HeldWeights, MergeBase
from async_grpo.weights.lora import DIGEST, adapter_names, base_digest
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.sender import copy_tensors
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.store import WeightStore
from rollout_server.engines.base import Generation, GenerationRequest
from rollout_server.engines.vllm.engine import VllmEngine
from tests.support.vllm_lab import EXACT, FAR, log_softmax, prompt_of, random_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

RUN = "test-vllm-adapters"
LORA = LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"))
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _no_shared_memory_is_left() -> Iterator[None]:
    yield
    remove_stores(RUN)


def drawn(model: torch.nn.Module, seed: int) -> Tensors:
    """Random adapters of every target, that change it slightly more than training would."""
    generator = torch.Generator().manual_seed(seed)
    adapters = {}
    for name, weight in model.named_parameters():
        if name.endswith(tuple(f"{target}.weight" for target in LORA.targets)):
            name_a, name_b = adapter_names(name)
            adapters[name_a] = 0.1 * torch.randn(LORA.rank, weight.shape[1], generator=generator)
            adapters[name_b] = 0.1 * torch.randn(weight.shape[0], LORA.rank, generator=generator)
    return adapters


def publish(store: WeightStore, version: int, adapters: Tensors, digest: bytes) -> HeldWeights:
    arrays = {name: tensor.numpy() for name, tensor in adapters.items()}
    copy_tensors(store.begin_write(), store.layout, {DIGEST: np.frombuffer(digest, np.uint8), **arrays}.items())
    store.commit_write(WeightVersion(1, version))
    return HeldWeights.in_store(store.path, epoch=1, version=version)


@pytest.mark.parametrize(
    ("how", "room_gib"),
    [("merged", 0.0), ("merged", 0.02), ("adapters", 0.0)],
    ids=["merged", "merged and staged", "adapters"],
)
async def test_the_engine_follows_adapters_through_updates_and_skipped_versions(
    tmp_path: Path, how: Literal["merged", "adapters"], room_gib: float
) -> None:
    model = random_model(tied=True, stop_tokens=None)
    model.save_pretrained(tmp_path)
    kinds = [(name, "float32", tensor.shape) for name, tensor in drawn(model, 0).items()]
    store = WeightStore.create(store_path(RUN, "store"), make_layout([(DIGEST, "uint8", [8]), *kinds]))
    limits = VllmConfig(max_model_len=1024, kv_cache_bytes=128 << 20, multiprocessing=False, staging_gib=room_gib)
    config = RolloutConfig(vllm=limits)
    lora = LORA.model_copy(update={"engine": how})
    engine = VllmEngine(tmp_path, config, precision="float32", seed=1, name="lora", lora=lora)
    base = MergeBase(folder=str(tmp_path), dtype="float32", scale=LORA.scale)
    try:
        await engine.start()
        assert await error(engine, model) < EXACT
        for version in (0, 1, 5):
            adapters = drawn(model, version)
            held = publish(store, version, adapters, base_digest(tmp_path))
            await engine.update_weights(held, interruption="keep")
            order = msgspec.json.encode(msgspec.structs.replace(held, base=base)).decode()
            if how == "merged":
                assert await engine.async_llm.collective_rpc("differing_weights", args=(order,)) == [[]]
            assert await error(engine, with_adapters(adapters)) < EXACT
        assert await error(engine, with_adapters(drawn(model, 1))) > FAR
        with pytest.raises(WeightsCorrupt, match="the same files"):
            await engine.update_weights(publish(store, 6, adapters, b"anything"), interruption="keep")
        assert await error(engine, with_adapters(adapters)) < EXACT

        running = asyncio.create_task(engine.generate(GenerationRequest("long", prompt_of(20, 1), 300, 1.0)))
        while (so_far := engine.peek("long")) is None or len(so_far.tokens) < 5:
            await asyncio.sleep(0.005)
        newer = drawn(model, 7)
        held = publish(store, 7, newer, base_digest(tmp_path))
        await engine.update_weights(held, interruption="keep")
        models = {5: with_adapters(adapters), 7: with_adapters(newer)}
        generation = await running
        assert [span.version for span in generation.spans] == [5, 7]
        assert spans_error(models, prompt_of(20, 1), generation) < EXACT
        assert engine.disputed_spans == 0
        (staged,) = await engine.async_llm.collective_rpc("staged_bytes")
        assert (staged > 0) == (room_gib > 0)
    finally:
        await engine.aclose()


def with_adapters(adapters: Tensors) -> torch.nn.Module:
    """The merge written out in float64."""
    model = random_model(tied=True, stop_tokens=None)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            name_a, name_b = adapter_names(name)
            if name_a in adapters:
                weight.add_((LORA.scale * adapters[name_b].double() @ adapters[name_a].double()).float())
    return model


async def error(engine: VllmEngine, model: torch.nn.Module) -> float:
    """Largest difference of a completion's log-probabilities from those of a Hugging Face model."""
    prompt = prompt_of(20, engine.version + 1)
    generation = await engine.generate(GenerationRequest(f"r{torch.randint(1 << 40, ()).item()}", prompt, 20, 1.0))
    return spans_error({engine.version: model}, prompt, generation)


def spans_error(models: dict[int, Any], prompt: Sequence[int], generation: Generation) -> float:
    """Largest difference from the models of the spans, each continuing with the KV cache of the one before."""
    cache, parts, sequence = DynamicCache(), [], [*prompt, *generation.tokens.tolist()]
    for span in generation.spans:
        inputs = sequence[cache.get_seq_length() : len(prompt) + span.end - 1]
        logprobs = log_softmax(models[span.version], inputs, cache, 1.0)[span.start - span.end :]
        tokens = torch.tensor(generation.tokens[span.start : span.end], dtype=torch.long)
        parts.append(logprobs.gather(1, tokens[:, None]))
    return float(np.abs(generation.logprobs - torch.cat(parts)[:, 0].numpy()).max())
