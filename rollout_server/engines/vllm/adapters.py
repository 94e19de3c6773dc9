"""LoRA adapters in an engine (`model.lora`): merged into its weights, or applied by vLLM.

    merged     held adapters --SourceReader: W + scale * B A--> layerwise reload of the targets
    adapters   held adapters --PEFT folder--> add_lora in place, while vLLM is paused --> W x + scale * B A x

With `adapters`, every request names the same vLLM adapter from the first request on; its B is zero until the first
update. Each update replaces it in place, so requests in flight continue with the new adapter, as they do with new
weights.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from async_grpo.config.model import LoraConfig
from async_grpo.errors import EngineError
from async_grpo.weights.base import HeldWeights, MergeBase
from async_grpo.weights.lora import (
    AdapterReader,
    WeightFiles,
    adapter_names,
    base_digest,
    make_peft_config,
    write_peft_folder,
)
from async_grpo.weights.source_reader import SourceReader

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `max_lora_rank`."""
ADAPTER_NAME = "policy"
ADAPTER_ID = 1


class EngineAdapters:
    """LoRA adapters of one engine. Without `lora` every method is a no-op."""

    def __init__(self, lora: LoraConfig | None, model_dir: Path, dtype: str) -> None:
        self._lora = lora
        self._model_dir = model_dir
        self._dtype = dtype
        self._folder: Path | None = None

    @property
    def applied_by_vllm(self) -> bool:
        """True if vLLM keeps the adapters apart from the weights."""
        return self._lora is not None and self._lora.engine == "adapters"

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments for AsyncEngineArgs: a single adapter of the configured rank."""
        if self._lora is None or not self.applied_by_vllm:
            return {}
        max_rank = next(rank for rank in VLLM_RANKS if rank >= self._lora.rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}

    def request_arguments(self) -> dict[str, Any]:
        """Arguments for every call of AsyncLLM.generate."""
        if not self.applied_by_vllm:
            return {}
        return {"lora_request": self._lora_request(in_place=False)}

    async def load_zero_adapter(self, llm: Any) -> None:
        """Load an adapter that adds nothing, for the requests before the first update."""
        if self._lora is None or not self.applied_by_vllm:
            return
        suffixes = tuple(f".{target}.weight" for target in self._lora.targets)
        checkpoint = WeightFiles(self._model_dir)
        zeros: dict[str, torch.Tensor] = {}
        for name in checkpoint:
            if name.endswith(suffixes):
                rows, columns = checkpoint.shape(name)
                name_A, name_B = adapter_names(name)
                zeros[name_A] = torch.zeros(self._lora.rank, columns)
                zeros[name_B] = torch.zeros(rows, self._lora.rank)

        self._folder = Path(tempfile.mkdtemp(prefix="async-grpo-adapters-"))
        await self._write_and_load(llm, zeros)

    async def attach_base(self, weights: HeldWeights) -> HeldWeights:
        """Return held adapters with the base weights to merge them into. The first call reads all base weights."""
        if self._lora is None:
            return weights
        # `base_digest` caches its result. In a thread, because the first call hashes the whole checkpoint.
        await asyncio.to_thread(base_digest, self._model_dir)
        base = MergeBase(folder=str(self._model_dir), dtype=self._dtype, scale=self._lora.scale)
        return replace(weights, base=base)

    async def load_adapters(self, llm: Any, weights: HeldWeights) -> None:
        """Replace vLLM's adapter with the held ones. Raises WeightsCorrupt if they were overwritten meanwhile."""
        reader = SourceReader().open(weights)
        assert isinstance(reader, AdapterReader)
        adapters = reader.read_adapters()
        reader.verify()
        await self._write_and_load(llm, adapters)

    def close(self) -> None:
        """Remove the temporary folder. Safe to call twice."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _write_and_load(self, llm: Any, adapters: dict[str, torch.Tensor]) -> None:
        assert self._folder is not None and self._lora is not None
        adapter_folder = self._folder / ADAPTER_NAME
        config = make_peft_config(self._lora, str(self._model_dir))
        await asyncio.to_thread(write_peft_folder, adapter_folder, config, adapters.items())
        if not await llm.add_lora(self._lora_request(in_place=True)):
            raise EngineError(f"vLLM did not load the adapters in {adapter_folder}. See vLLM's log for the reason.")

    def _lora_request(self, *, in_place: bool) -> Any:
        from vllm.lora.request import LoRARequest

        folder = self._folder or Path()
        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder / ADAPTER_NAME), load_inplace=in_place)
