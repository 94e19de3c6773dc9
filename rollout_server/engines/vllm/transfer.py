"""Weight updates as calls into vLLM: stage a version while the engine generates, then load it during a pause.

stage: workers copy the version to a buffer next to the model (`staging.StagingBuffer`), if they have one
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
from rollout_server.engines.vllm.compat import accepted_arguments

_STAGING_POLL_S = 0.01


class WeightTransfer:
    """Calls into vLLM's workers for weights of `dtype`. Adapters that vLLM applies itself go to `adapters`."""

    def __init__(self, config: VllmConfig, dtype: Precision, adapters: EngineAdapters) -> None:
        self._config = config
        self._dtype = dtype
        self._adapters = adapters

    async def initialize_workers(self, llm: Any) -> None:
        """Prepare the workers for updates. Call before the first request."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        staging_bytes = 0 if self._adapters.applied_by_vllm else self._config.staging_bytes
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"staging_bytes": staging_bytes}))
        await llm.collective_rpc("report_sampled_logprobs")
        await self._adapters.load_zero_adapter(llm)

    async def stage_weights(self, llm: Any, weights: HeldWeights) -> None:
        """Copy as much of the version as fits into every worker's staging buffer, while generation continues."""
        if self._adapters.applied_by_vllm or not self._config.staging_bytes:
            return
        await llm.collective_rpc("stage_weights", args=(self._update_info(weights),))

        # Poll: the copies run in threads of other processes. Waiting inside the call would block the worker, and with
        # it generation.
        while None in await llm.collective_rpc("staged_bytes"):  # noqa: ASYNC110
            await asyncio.sleep(_STAGING_POLL_S)

    async def announce_update(self, llm: Any) -> None:
        """Announce an update to vLLM. Nothing is loaded yet, and generation continues."""
        await llm.start_weight_update(**accepted_arguments(llm.start_weight_update, is_checkpoint_format=False))

    async def load_weights(self, llm: Any, weights: HeldWeights) -> None:
        """Load the version into a paused engine."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._adapters.applied_by_vllm:
            await self._adapters.load_adapters(llm, weights)
        else:
            await llm.update_weights(WeightTransferUpdateRequest(update_info=self._update_info(weights)))

        # The version labels the tokens that follow.
        finish = llm.finish_weight_update
        await finish(**accepted_arguments(finish, weight_version=str(weights.version)))

    def _update_info(self, weights: HeldWeights) -> dict[str, Any]:
        """A `worker.StoreUpdate` as plain values, because vLLM sends nothing else to its workers."""
        return {
            "held": msgspec.json.encode(weights).decode(),
            "dtype": self._dtype,
            "quantization": self._config.quantization,
            "captured_graphs": not self._config.is_eager,
        }
