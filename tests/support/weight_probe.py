"""Reads back, inside vLLM's worker, the weights that it really multiplies with."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.wrong_engines import AnyLogprobs


class WeightProbe(AnyLogprobs):
    """On CPU vLLM packs matrices in a form that cannot be read: they are multiplied with the unit matrix
    instead, which gives every element exactly."""

    def scheduled_at_most(self) -> list[int]:
        """Requests and tokens for which the model runner has buffers."""
        return [self.model_runner.max_num_reqs, self.model_runner.max_num_tokens]

    def addresses(self) -> dict[str, int]:
        """Where each tensor of the model lies in memory; a captured graph reads it there."""
        tensors = self.model_runner.model.state_dict(keep_vars=True)
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}

    def read_weights(self) -> dict[str, tuple[list[int], bytes]]:
        """Shape and float32 bytes by name: `<module>.<parameter>` as it is, `<module>.packed` unpacked."""
        found: dict[str, tuple[list[int], bytes]] = {}
        for name, module in self.model_runner.model.named_modules(remove_duplicate=False):  # type: ignore[attr-defined]
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.numel():
                    found[f"{name}.{key}"] = _portable(parameter.detach())
            if hasattr(module, "cpu_linear"):
                inputs = getattr(module, "input_size_per_partition", None) or module.embedding_dim
                product = module.cpu_linear(torch.eye(inputs), module.weight, None)
                found[f"{name}.packed"] = _portable(product.T)
        return found


def _portable(tensor: torch.Tensor) -> tuple[list[int], bytes]:
    return list(tensor.shape), tensor.contiguous().numpy().astype(np.float32).tobytes()
