"""A real engine on a tiny random model, with a plain Hugging Face model of every version to compare with."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from async_grpo.config.model import Precision
from async_grpo.config.rollout import RolloutConfig, VllmConfig
from async_grpo.weights import chunks
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.store import VersionNotes, WeightStore
from rollout_server.engines.base import Generation, GenerationRequest, Interruption
from rollout_server.engines.vllm.engine import VllmEngine

VOCABULARY = 512
STOP_TOKENS = list(range(16))
FIRST_PROMPT = [40, 41, 42]
EXACT = 1e-4
FAR = 1e-3
PROBE = "tests.support.weight_probe.WeightProbe"
"""Only vLLM's worker imports it."""


class Lab:
    """An engine, its checkpoint folder, its weight store, and a reference model of every version."""

    def __init__(
        self, model_dir: Path, *, run: str, tied: bool, stop_tokens: list[int] | None = None, **vllm: Any
    ) -> None:
        """`vllm`: fields of VllmConfig."""
        self.tied = tied
        self.model_dir = model_dir
        self.models = {-1: random_model(tied, stop_tokens)}
        self.models[-1].save_pretrained(model_dir)
        self.engine = engine_of(model_dir, **vllm)
        tensors = self.tensors(-1)
        layout = make_layout([(name, "float32", array.shape) for name, array in tensors.items()])
        self.store = WeightStore.create(store_path(run, model_dir.name), layout)
        self.first: Generation
        """Completion of FIRST_PROMPT before any update."""
        self.longest_block_s = 0.0
        """Longest time that the event loop was blocked while the engine started."""
        self._requests = 0

    async def watch_loop(self) -> None:
        """Measure how long the event loop is blocked, until cancelled."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.05)
            self.longest_block_s = max(self.longest_block_s, time.monotonic() - before_s)

    async def update(
        self, interruption: Interruption, *, moved: Collection[str] | None = None, noted: Collection[str] | None = None
    ) -> int:
        """Publish a new version and load it into the engine. Returns the version."""
        held = self.publish(moved=moved, noted=noted)
        await self.engine.update_weights(held, interruption=interruption)
        return held.version

    def publish(self, *, moved: Collection[str] | None, noted: Collection[str] | None) -> HeldWeights:
        """Put a new version into the store, in which the tensors `moved` (None: all) differ from the version before.

        noted: tensors that the version's note lists as changed; None: no note.
        """
        version = len(self.models) - 1
        self.models[version] = perturbed(self.models[version - 1], seed=version, names=moved)
        block = np.frombuffer(self.store.begin_write(), np.uint8)
        tensors = self.tensors(version)
        for spec in self.store.layout.tensors:
            block[spec.offset : spec.offset + spec.nbytes] = tensors[spec.name].reshape(-1).view(np.uint8)
        flags = [noted is not None and spec.name in noted for spec in self.store.layout.tensors]
        base = None if noted is None else (0, version - 1)
        self.store.commit_write(WeightVersion(0, version), VersionNotes(base=base, changed=chunks.pack_bits(flags)))
        return HeldWeights.in_store(self.store.path, epoch=0, version=version)

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, *, temperature: float = 1.0, prefix: Sequence[int] = ()
    ) -> Generation:
        self._requests += 1
        return await self.engine.generate(
            GenerationRequest(f"r{self._requests}", prompt, max_tokens, temperature, prefix=prefix)
        )

    def reference(
        self, prompt: Sequence[int], generation: Generation, *, temperature: float = 1.0, keep: bool = True
    ) -> npt.NDArray[np.float32]:
        """Log-probabilities of the tokens by the reference models of their spans.

        keep: each model continues with the KV cache of the models before it; else it encodes everything again.
        """
        parts = []
        cache = DynamicCache()
        sequence = [*prompt, *generation.tokens.tolist()]
        for span in generation.spans:
            if not keep:
                cache = DynamicCache()
            inputs = sequence[cache.get_seq_length() : len(prompt) + span.end - 1]
            logprobs = log_softmax(self.models[span.version], inputs, cache, temperature)[-(span.end - span.start) :]
            tokens = torch.tensor(generation.tokens[span.start : span.end], dtype=torch.long)
            parts.append(logprobs.gather(1, tokens[:, None])[:, 0])
        return torch.cat(parts).numpy()

    def error(self, prompt: Sequence[int], generation: Generation, **options: Any) -> float:
        """Largest difference from the reference."""
        return float(np.abs(generation.logprobs - self.reference(prompt, generation, **options)).max())

    def tensors(self, version: int) -> dict[str, npt.NDArray[np.float32]]:
        """Published tensors of a version, by name."""
        state = self.models[version].state_dict()
        return {name: tensor.numpy() for name, tensor in state.items() if not (self.tied and name == "lm_head.weight")}


@asynccontextmanager
async def started_lab(
    model_dir: Path, *, tied: bool, stop_tokens: list[int] | None = None, **vllm: Any
) -> AsyncIterator[Lab]:
    """A lab with a running engine whose weights can be read. Restores the environment and removes the store."""
    run = f"test-vllm-{os.getpid()}-{model_dir.name}"
    before = dict(os.environ)
    vllm = {"extra": {"worker_extension_cls": PROBE}, **vllm}
    lab = Lab(model_dir, run=run, tied=tied, stop_tokens=stop_tokens, **vllm)
    try:
        watching = asyncio.create_task(lab.watch_loop())
        await asyncio.sleep(0.01)  # let the watcher start, so that it notices a loop that is blocked immediately
        await lab.engine.start()
        await asyncio.sleep(0.1)
        watching.cancel()
        os.environ.clear()
        os.environ.update(before)
        lab.first = await lab.generate(FIRST_PROMPT, 24)
        yield lab
    finally:
        await lab.engine.aclose()
        remove_stores(run)


def engine_of(model_dir: Path, *, precision: Precision = "float32", fp32_head: bool = False, **vllm: Any) -> VllmEngine:
    """A small engine that starts quickly; `vllm`: fields of VllmConfig."""
    defaults = {"max_model_len": 1024, "kv_cache_bytes": 128 << 20, "multiprocessing": False}
    config = RolloutConfig(vllm=VllmConfig(**defaults | vllm))
    return VllmEngine(model_dir, config, precision=precision, seed=1, name=model_dir.name, fp32_head=fp32_head)


def random_model(tied: bool, stop_tokens: list[int] | None) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,  # head_dim 32, the smallest that vLLM has on CPU
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=stop_tokens,
    )
    return Qwen2ForCausalLM(config).eval()


def perturbed(model: Qwen2ForCausalLM, seed: int, names: Collection[str] | None = None) -> Qwen2ForCausalLM:
    """A policy some optimizer steps later: all tensors differ, or only `names`."""
    generator = torch.Generator().manual_seed(seed)
    moved = Qwen2ForCausalLM(model.config).eval()
    moved.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if names is None or name in names:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return moved


@torch.no_grad()
def log_softmax(model: Qwen2ForCausalLM, inputs: Sequence[int], cache: DynamicCache, temperature: float) -> Any:
    """Log-probabilities [len(inputs), vocabulary] after each input; appends the inputs to the cache."""
    logits = model(torch.tensor([list(inputs)]), past_key_values=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits / temperature, -1)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(len(STOP_TOKENS), VOCABULARY, length).tolist()
