"""The policy being trained: Megatron's model, DDP and distributed optimizer, as one noun."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from transformers import PretrainedConfig

from async_grpo.config.trainer import OptimizerConfig
from async_grpo.errors import TrainingError
from trainer.entropy import vocab_parallel_entropy
from trainer.model.build import build_model
from trainer.model.convert import export_hf
from trainer.platform import Platform
from trainer.sequences import MicroBatch

LossFunction = Callable[[Tensor, Tensor | None, MicroBatch], tuple[Tensor, Any]]
"""(logprobs_N, entropy_N if asked for, micro-batch) -> (loss to differentiate, anything to hand back)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """This rank's part. `wrapped` is what is called; `model` is the GPTModel inside."""

    hf: PretrainedConfig
    model: GPTModel
    wrapped: DistributedDataParallel
    optimizer: Any
    weight_decay: float
    temperature: float

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.model.config.params_dtype

    def run(
        self, batches: Sequence[MicroBatch], loss: LossFunction, *, train: bool, entropy: bool = False
    ) -> list[Any]:
        """Forward (and, to train, backward) over the micro-batches, through Megatron's schedule.

        Returns what `loss` handed back for each, on the last pipeline stage; [] on the others.
        Gradients end up summed over micro-batches and data-parallel ranks, with no other scaling.
        """
        with torch.set_grad_enabled(train):
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=lambda iterator, model: self._forward(iterator, model, loss, entropy),
                data_iterator=iter(batches),
                model=[self.wrapped],
                num_microbatches=len(batches),
                seq_length=max(batch.tokens_1T.shape[1] for batch in batches),
                micro_batch_size=1,
                forward_only=not train,
            )
        return results

    def zero_grad(self) -> None:
        """Before the backward passes of a step."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self, lr: float) -> float:
        """One optimizer step; returns the gradient norm before clipping.

        Raises TrainingError, on all ranks and before any weight changes, if the gradient is not finite.
        """
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"the gradient norm is {grad_norm}: this step would destroy the weights, so it was not taken. "
                "Lower trainer.optimizer.lr or trainer.objective.behaviour_cap"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # Megatron states which groups decay (wd_mult) but leaves applying it to its scheduler.
            group["weight_decay"] = self.weight_decay * group["wd_mult"]
        self.optimizer.step()
        return grad_norm

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """See `export_hf`. On ranks other than data-parallel rank 0: nothing, at once."""
        if parallel_state.get_data_parallel_rank() == 0:
            yield from export_hf(self.model, self.hf)

    def _forward(
        self, iterator: Iterator[MicroBatch], model: DistributedDataParallel, loss: LossFunction, entropy: bool
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        batch = next(iterator)
        output = model(batch.tokens_1T, batch.positions_1T, None, packed_seq_params=batch.packing)

        def finish(logits_1TV: Tensor) -> tuple[Tensor, Tensor, Any]:
            logits_NV = trained_logits(logits_1TV, batch, self.temperature)
            entropy_N = vocab_parallel_entropy(logits_NV) if entropy else None
            logprobs_N = -vocab_parallel_cross_entropy(logits_NV, batch.labels_N)  # overwrites the logits: last
            value, handed_back = loss(logprobs_N, entropy_N, batch)
            return value, torch.ones((), dtype=torch.int), handed_back

        return output, finish


def trained_logits(logits_1TV: Tensor, batch: MicroBatch, temperature: float) -> Tensor:
    """float32 [N, V] logits of the distribution that the trained tokens are sampled from.

    Each tensor-parallel rank has its slice of the vocabulary V. They are a tensor of their own (`index_select`
    copies, whatever the temperature is), so that what follows may overwrite them.
    """
    return logits_1TV[0].index_select(0, batch.trained_N).float() / temperature


def build_policy(
    hf: PretrainedConfig, platform: Platform, config: OptimizerConfig, dtype: torch.dtype, temperature: float
) -> Policy:
    """Model and optimizer of this rank; the weights are to be loaded before the first use of the optimizer."""
    model = build_model(hf, platform, dtype)
    inner = Float16Module(model.config, model) if dtype == torch.bfloat16 else model
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        inner,
    )
    settings = _optimizer_settings(config, dtype)
    optimizer = get_megatron_optimizer(settings, [wrapped], config_overrides=get_standard_config_overrides(settings))
    model.config.finalize_model_grads_func = _finalize
    model.config.grad_scale_func = optimizer.scale_loss
    return Policy(hf, model, wrapped, optimizer, config.weight_decay, temperature)


def _finalize(chunks: list[Any], _num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sum gradients over ranks. Token counts are in the weights already: nothing is divided here."""
    finalize_model_grads(chunks, None, **kwargs)


def _optimizer_settings(config: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
