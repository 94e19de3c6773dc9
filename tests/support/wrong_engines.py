"""Faults of an engine, as worker extensions for `rollout.vllm.extra`:

    -o 'rollout.vllm.extra={worker_extension_cls: tests.support.wrong_engines.RawLogprobs}'

Only vLLM's worker imports this module.
"""

from __future__ import annotations

from rollout_server.engines.vllm.worker import WorkerExtension


class AnyLogprobs(WorkerExtension):
    """Its sampler reports what a test asks for."""

    def report(self, mode: str) -> None:
        """`mode`: one of vLLM's `logprobs_mode`."""
        sampler = self.model_runner.sampler
        for part in (sampler, sampler.topk_topp_sampler):
            part.logprobs_mode = mode


class RawLogprobs(AnyLogprobs):
    """Reports log-probabilities of temperature 1, as the sampler of vllm-ascend 0.23 does by itself."""

    def report_sampled_logprobs(self) -> None:
        self.report("raw_logprobs")
