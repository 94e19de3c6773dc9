"""Faulty engines, as worker extensions for `rollout.vllm.extra`:

    -o 'rollout.vllm.extra={worker_extension_cls: tests.support.wrong_engines.RawLogprobs}'

Only vLLM's worker imports this module.
"""

from __future__ import annotations

import torch

from rollout_server.engines.vllm import reload
from rollout_server.engines.vllm.worker import WorkerExtension


class AnyLogprobs(WorkerExtension):
    """The sampler reports log-probabilities in a mode that the test chooses."""

    def report(self, mode: str) -> None:
        """Set the mode, one of vLLM's `logprobs_mode`."""
        sampler = self.model_runner.sampler
        for part in (sampler, sampler.topk_topp_sampler):
            part.logprobs_mode = mode


class RawLogprobs(AnyLogprobs):
    """Reports log-probabilities of temperature 1, as the sampler of vllm-ascend 0.23 does by default."""

    def report_sampled_logprobs(self) -> None:
        self.report("raw_logprobs")


class MovesNorm(WorkerExtension):
    """Every update moves one parameter in memory, as processing outside of vLLM's reload does."""

    def report_sampled_logprobs(self) -> None:
        super().report_sampled_logprobs()
        restore_weight_attributes = reload.restore_weight_attributes

        def restore_and_move(model: torch.nn.Module) -> None:
            restore_weight_attributes(model)
            norm = model.get_parameter("model.norm.weight")
            norm.data = norm.data.clone()

        reload.restore_weight_attributes = restore_and_move
