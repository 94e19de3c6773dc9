"""What an engine does with adapters (`model.lora`): they are added to its weights, or vLLM computes with both.

    merged     held adapters --SourceReader: W + scale * B A--> layerwise reload of the targets
    adapters   held adapters --PEFT folder--> add_lora in place, while vLLM is paused --> W x + scale * B A x

With `adapters` all requests name one adapter of vLLM, from the first request on (its B is zero until the first update).
It is replaced in place, so requests in flight go on with the new one, as they do with new weights.
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
from async_grpo.weights.lora import AdapterReader, BaseFolder, adapter_names, base_digest, peft_config, write_peft
from async_grpo.weights.source_reader import SourceReader

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""
NAME, NUMBER = "policy", 1


class EngineAdapters:
    """The adapters of one engine; without `lora` nothing of it does anything."""

    def __init__(self, lora: LoraConfig | None, model_dir: Path, dtype: str) -> None:
        self._lora = lora
        self._model_dir = model_dir
        self._dtype = dtype
        self._folder: Path | None = None

    @property
    def in_engine(self) -> bool:
        """Whether vLLM computes with adapters beside the weights."""
        return self._lora is not None and self._lora.engine == "adapters"

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of the engine: one adapter of this rank at a time."""
        if self._lora is None or not self.in_engine:
            return {}
        rank = next(each for each in VLLM_RANKS if each >= self._lora.rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}

    def request_arguments(self) -> dict[str, Any]:
        """Arguments of every request."""
        return {"lora_request": self._request(in_place=False)} if self.in_engine else {}

    async def start(self, llm: Any) -> None:
        """Load an adapter that adds nothing."""
        if self._lora is None or not self.in_engine:
            return
        folder = BaseFolder(self._model_dir)
        zeros: dict[str, torch.Tensor] = {}
        for name in folder:
            if name.endswith(tuple(f".{target}.weight" for target in self._lora.targets)):
                rows, columns = folder.shape(name)
                shapes = (self._lora.rank, columns), (rows, self._lora.rank)
                zeros |= {each: torch.zeros(shape) for each, shape in zip(adapter_names(name), shapes, strict=True)}
        self._folder = Path(tempfile.mkdtemp(prefix="async-grpo-adapters-"))
        await self._put(llm, zeros)

    async def on_base(self, weights: HeldWeights) -> HeldWeights:
        """Held adapters with the weights that they are added to; the first time this reads all of these."""
        if self._lora is None:
            return weights
        await asyncio.to_thread(base_digest, self._model_dir)  # which keeps it
        base = MergeBase(folder=str(self._model_dir), dtype=self._dtype, scale=self._lora.scale)
        return replace(weights, base=base)

    async def load(self, llm: Any, weights: HeldWeights) -> None:
        """Replace vLLM's adapter by the held ones. Raises WeightsCorrupt if they were overwritten meanwhile."""
        reader = SourceReader().open(weights)
        assert isinstance(reader, AdapterReader)
        adapters = reader.adapters()
        reader.verify()
        await self._put(llm, adapters)

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _put(self, llm: Any, adapters: dict[str, torch.Tensor]) -> None:
        assert self._folder is not None and self._lora is not None
        config = peft_config(self._lora, str(self._model_dir))
        await asyncio.to_thread(write_peft, self._folder / NAME, config, adapters.items())
        if not await llm.add_lora(self._request(in_place=True)):
            raise EngineError(f"vLLM did not load the adapters in {self._folder / NAME}; its log says why.")

    def _request(self, *, in_place: bool) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(NAME, NUMBER, str((self._folder or Path()) / NAME), load_inplace=in_place)
