"""Reads the weights that vLLM's worker multiplies with, from inside the worker."""

from __future__ import annotations

import numpy as np

from rollout_server.engines.vllm.reload import multiplied_weights
from tests.support.wrong_engines import AnyLogprobs


class WeightProbe(AnyLogprobs):
    """Worker extension for oracles outside the worker."""

    def scheduled_at_most(self) -> list[int]:
        """Capacity of the model runner's buffers: requests, tokens."""
        return [self.model_runner.max_num_reqs, self.model_runner.max_num_tokens]

    def addresses(self) -> dict[str, int]:
        """Memory address of each tensor of the model."""
        tensors = self.model_runner.model.state_dict(keep_vars=True)
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}

    def clear_staged(self) -> None:
        """Fill the staging buffer with zeros."""
        self.weight_transfer_engine._staging._memory.zero_()

    def read_weights(self) -> dict[str, tuple[list[int], bytes]]:
        """Shape and float32 bytes by name."""
        return {
            name: (list(tensor.shape), tensor.contiguous().numpy().astype(np.float32).tobytes())
            for name, tensor in multiplied_weights(self.model_runner.model)
        }
