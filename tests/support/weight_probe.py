"""Reads back, inside vLLM's worker, the weights that it really multiplies with."""

from __future__ import annotations

import numpy as np

from rollout_server.engines.vllm.reload import multiplied_weights
from tests.support.wrong_engines import AnyLogprobs


class WeightProbe(AnyLogprobs):
    """For oracles outside the worker."""

    def scheduled_at_most(self) -> list[int]:
        """Requests and tokens for which the model runner has buffers."""
        return [self.model_runner.max_num_reqs, self.model_runner.max_num_tokens]

    def addresses(self) -> dict[str, int]:
        """Where each tensor of the model lies in memory; a captured graph reads it there."""
        tensors = self.model_runner.model.state_dict(keep_vars=True)
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}

    def clear_staged(self) -> None:
        """Set the memory in which a version is staged to zeros."""
        self.weight_transfer_engine._room._room.zero_()

    def read_weights(self) -> dict[str, tuple[list[int], bytes]]:
        """Shape and float32 bytes by name."""
        return {
            name: (list(tensor.shape), tensor.contiguous().numpy().astype(np.float32).tobytes())
            for name, tensor in multiplied_weights(self.model_runner.model)
        }
