"""What an update asks of vLLM: to stage a version while it generates, and to load it in a pause.

stage: workers copy the version beside the model (`staging.StagingRoom`), if they have room
load:  update_weights --> workers reload what changed (`worker.WeightLoader`) --> tokens carry the new version
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from async_grpo.config.model import Precision
from async_grpo.config.rollout import VllmConfig
from async_grpo.weights.base import HeldWeights
from rollout_server.engines.vllm.adapters import EngineAdapters
from rollout_server.engines.vllm.compat import accepted

_LOOK_EVERY_S = 0.01


class WeightTransfer:
    """The calls into vLLM's workers, for weights of `dtype`; adapters that vLLM applies itself go to `adapters`."""

    def __init__(self, config: VllmConfig, dtype: Precision, adapters: EngineAdapters) -> None:
        self._config = config
        self._dtype = dtype
        self._adapters = adapters

    async def start(self, llm: Any) -> None:
        """Make the workers ready, before the first request."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        room = 0 if self._adapters.in_engine else self._config.staging_bytes
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"staging_bytes": room}))
        await llm.collective_rpc("report_sampled_logprobs")
        await self._adapters.start(llm)

    async def stage(self, llm: Any, weights: HeldWeights) -> None:
        """Copy the version beside the model of every worker, as far as there is room; generation goes on."""
        if self._adapters.in_engine or not self._config.staging_bytes:
            return
        await llm.collective_rpc("stage_weights", args=(self._update(weights),))
        while None in await llm.collective_rpc("staged_bytes"):  # noqa: ASYNC110  (threads of other processes)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def announce(self, llm: Any) -> None:
        """Tell vLLM that an update comes. Nothing happens yet, so generation goes on."""
        await llm.start_weight_update(**accepted(llm.start_weight_update, is_checkpoint_format=False))

    async def load(self, llm: Any, weights: HeldWeights) -> None:
        """Load the version into a paused engine."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._adapters.in_engine:
            await self._adapters.load(llm, weights)
        else:
            await llm.update_weights(WeightTransferUpdateRequest(update_info=self._update(weights)))
        finish = llm.finish_weight_update
        await finish(**accepted(finish, weight_version=str(weights.version)))  # labels the tokens that follow

    def _update(self, weights: HeldWeights) -> dict[str, Any]:
        """`worker.StoreUpdate`, as plain values."""
        return {
            "held": msgspec.json.encode(weights).decode(),
            "dtype": self._dtype,
            "quantization": self._config.quantization,
            "captured_graphs": not self._config.is_eager,
        }
