"""The policy being trained: Megatron's model, DDP and distributed optimizer in one object.

    MicroBatch (CPU) --select_rank_tokens, to_device--> network --> logits of the trained positions
        loss (CPU) <--to_device-- log-probabilities [, entropy] <--------+

Batches are made on the CPU. What the network reads of a micro-batch goes to the device when its turn comes, and the
log-probabilities come back, because the objective is evaluated on the CPU on every platform alike: it needs a few
numbers per token and statistics in float64, which not every accelerator has, and this way host and device synchronize
once per micro-batch.

The entropy H of the next-token distribution is computed where every tensor-parallel rank has a slice of the vocabulary:

    H = log Z - sum_v p_v l_v      with three small reductions: of the peak, of Z and of the sum
    dH / dl_v = -p_v (log p_v + H) needs only this rank's slice

Where ranks have different tokens, gradients are summed bucket by bucket while the last backward pass of a step still
computes. Megatron's counterpart for weights, `overlap_param_gather`, is not used: it gathers a layer's new weights when
the next forward pass comes to it, but a version is published, and a reference synced, as soon as it is made.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from transformers import PretrainedConfig

from async_grpo.config import RunConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.models.shapes import ModelShape, shape_of
from trainer.batch.context_parallel import current_context_rank, select_rank_tokens
from trainer.batch.sequences import MicroBatch
from trainer.model.builder import DTYPES, build_model
from trainer.model.checks import check_architecture, check_lora
from trainer.model.hf_folder import SafetensorsFolder, read_config
from trainer.model.hf_weights import load_hf
from trainer.model.lora import Adapters, attach_adapters, export_trained, export_whole, sharded_state
from trainer.model.optimizer import StateOffload, optimizer_settings, update
from trainer.platform import Platform

T = TypeVar("T")

LossFunction = Callable[[Tensor, Tensor | None, MicroBatch], tuple[Tensor, Any]]
"""(logprobs_N, entropy_N if asked for, micro-batch) -> (loss to differentiate, anything to hand back)."""


def divide_in_place(tensor: Tensor, divisor: float) -> Tensor:
    """Divide a tensor without a copy of it, and its gradient without a copy of that."""
    divided: Tensor = _DivideInPlace.apply(tensor, divisor)
    return divided


class _DivideInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: float) -> Tensor:
        ctx.divisor = divisor
        ctx.mark_dirty(tensor)
        return tensor.div_(divisor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].div_(ctx.divisor), None


def vocab_parallel_entropy(logits_NV: Tensor) -> Tensor:
    """The entropy of each row: [N], in nats, with gradient.

    `logits_NV` may be overwritten afterwards: nothing of it is kept.
    """
    entropy_N: Tensor = _VocabParallelEntropy.apply(logits_NV)
    return entropy_N


class _VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        peak_N = logits_NV.amax(-1)
        dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
        shifted_NV = logits_NV - peak_N[:, None]
        weights_NV = shifted_NV.exp()
        sums_2N = torch.stack([weights_NV.sum(-1), shifted_NV.mul_(weights_NV).sum(-1)])
        dist.all_reduce(sums_2N, group=group)
        total_N, weighted_N = sums_2N
        entropy_N = total_N.log() - weighted_N / total_N
        ctx.save_for_backward(weights_NV.div_(total_N[:, None]), entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        probabilities_NV, entropy_N = ctx.saved_tensors
        gradient_NV: Tensor = torch.special.entr(probabilities_NV)
        gradient_NV.addcmul_(probabilities_NV, entropy_N[:, None], value=-1)
        return gradient_NV.mul_(gradients[0][:, None])


def to_device(value: T, device: torch.device | str) -> T:
    """`value` with its tensors on `device`: a tensor, or dataclasses, tuples and lists of them, at any depth.

    Tensors that are there already are not copied; anything else is left as it is. A gradient finds its way back. The
    host waits only for what comes to the CPU: what goes to a device is copied from pinned memory, in the order of the
    device's work.
    """
    placed: Any = value
    if isinstance(value, Tensor):
        leaves = value.device.type == "cpu" and torch.device(device).type != "cpu"
        pinned = value.pin_memory() if leaves and not value.requires_grad else value
        placed = pinned.to(device, non_blocking=leaves)
    elif isinstance(value, tuple | list):
        placed = type(value)(to_device(part, device) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        placed = dataclasses.replace(value, **{name: to_device(part, device) for name, part in parts.items()})
    return placed


class BackgroundReading:
    """At most one function that reads the weights in a thread, beside the training."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, read: Callable[[], None]) -> None:
        """Begin; `wait` must have been called since the last one."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(read,), name="reads the weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for its end, before the weights are changed. Raises what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise, once, what the function has raised; waits for nothing."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _run(self, read: Callable[[], None]) -> None:
        try:
            read()
        except BaseException as error:
            self._failure = error


@dataclass(frozen=True, slots=True)
class Policy:
    """This rank's part of the policy. `wrapped` is what is called; `model` is the GPTModel inside."""

    hf: PretrainedConfig
    model: GPTModel
    wrapped: DistributedDataParallel
    optimizer: Any
    weight_decay: float
    temperature: float
    offload: StateOffload | None = None
    adapters: Adapters | None = None
    """What is trained where the weights are frozen."""
    reading: BackgroundReading = field(default_factory=BackgroundReading)
    """Copies the weights of a version while the next step begins."""
    shape: ModelShape = field(init=False)
    """Dimensions of the whole model."""

    def __post_init__(self) -> None:
        # Once, and not in each micro-batch: transformers copies its whole configuration to show it.
        object.__setattr__(self, "shape", shape_of(self.hf))

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.model.config.params_dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    def run(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction,
        *,
        train: bool,
        entropy: bool = False,
        total: bool = True,
    ) -> list[Any]:
        """Forward (and, to train, backward) over the micro-batches, through Megatron's schedule.

        Returns what `loss` handed back for each, on the last pipeline stage; [] on the others.
        Gradients end up summed over micro-batches and over the ranks that have different tokens, with no other
        scaling. `loss` sees the whole micro-batch even where ranks share its sequences.
        Without `total` each rank keeps adding up its own, until `total_gradients`.
        """
        config = self.model.config
        config.finalize_model_grads_func = _finalize if total else None
        # Within `no_sync` no sum over ranks begins. The schedule leaves it for its last backward pass. If that were not
        # the last one of the step, gradients would be added to a bucket whose sum has begun.
        config.no_sync_func = self.wrapped.no_sync if train and total else None
        with torch.set_grad_enabled(train), self.wrapped.no_sync() if train and not total else nullcontext():
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

    def total_gradients(self, scale: float) -> None:
        """Sum the gradients over the ranks and multiply them by `scale`. To be called once, after the last pass."""
        if self.wrapped.ddp_config.overlap_grad_reduce:
            self.wrapped.start_grad_sync()  # no backward pass has: none was known to be the last one
        _finalize([self.wrapped])
        self.wrapped.scale_gradients(scale)

    def zero_grad(self) -> None:
        """Clear the gradients, before the backward passes of a step."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self, lr: float) -> float:
        """Make one optimizer update; see `trainer.model.optimizer.update`."""
        self.reading.wait()
        return update(self.optimizer, lr, self.weight_decay, self.offload)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors on rank 0, on the CPU, one at a time, with adapters added; see `gathered`."""
        yield from export_whole(self.model, self.hf, self.adapters)

    def export_trained(self) -> Iterator[tuple[str, Tensor]]:
        """As `export`, of what is trained: the adapters alone, if there are any."""
        yield from export_trained(self.model, self.hf, self.adapters)

    def sharded_state(self, metadata: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """What is trained, as Megatron's sharded tensors of this rank; `prefix` is put before all names."""
        return sharded_state(self.model, self.hf, self.adapters, metadata, prefix)

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Load what `sharded_state` was filled with."""
        self.reading.wait()
        self.model.load_state_dict(state, strict=self.adapters is None)

    def _forward(
        self, iterator: Iterator[MicroBatch], model: DistributedDataParallel, loss: LossFunction, entropy: bool
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        batch = next(iterator)
        part = to_device(
            select_rank_tokens(batch, current_context_rank(self.model.config.sequence_parallel)), self.device
        )
        packing = replace(part.packing, trained=part.trained_M)
        output = model(part.tokens_1T, part.positions_1T, None, packed_seq_params=packing)

        def finish(logits_1MV: Tensor) -> tuple[Tensor, Tensor, Any]:
            # float32 [M, V / tensor-parallel ranks], which what follows may overwrite. Float16Module has made a float32
            # copy of bfloat16 logits, and the division needs no other. Those of float32 are the output layer's own.
            # (`flatten` is a view in both directions; the gradient of an index would be a copy.)
            copied = logits_1MV if self.dtype == torch.bfloat16 else logits_1MV.clone()
            logits_MV = divide_in_place(copied, self.temperature).flatten(0, 1)
            entropy_M = vocab_parallel_entropy(logits_MV) if entropy else None
            labels_M = part.select_own(to_device(batch.labels_N, self.device))
            logprobs_M = -vocab_parallel_cross_entropy(logits_MV, labels_M)  # overwrites the logits: last
            count = len(batch.labels_N)
            entropy_N = None if entropy_M is None else part.merge(entropy_M, count)
            logprobs_N, entropy_N = to_device((part.merge(logprobs_M, count), entropy_N), "cpu")
            value, handed_back = loss(logprobs_N, entropy_N, batch)
            return to_device(value, self.device), torch.ones((), dtype=torch.int, device=self.device), handed_back

        return output, finish


def build_policy(
    hf: PretrainedConfig,
    platform: Platform,
    config: TrainerConfig,
    dtype: torch.dtype,
    temperature: float,
    adapters: Adapters | None = None,
    seed: int = 0,
) -> Policy:
    """Model and optimizer of this rank; the weights are to be loaded before the first use of the optimizer. `seed`: of
    the `adapters`."""
    model = build_model(hf, platform, dtype, config)
    if adapters is not None:
        attach_adapters(model, hf, adapters.config, seed)
    inner = Float16Module(model.config, model) if dtype == torch.bfloat16 else model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1,
    )
    wrapped = DistributedDataParallel(model.config, ddp_config, inner)
    settings = optimizer_settings(config.optimizer, dtype)
    optimizer = get_megatron_optimizer(settings, [wrapped], config_overrides=get_standard_config_overrides(settings))
    model.config.grad_scale_func = optimizer.scale_loss
    offload = StateOffload(optimizer, platform.device) if config.optimizer.offload else None
    return Policy(hf, model, wrapped, optimizer, config.optimizer.weight_decay, temperature, offload, adapters)


def _finalize(chunks: list[Any], _num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sum gradients over ranks. Token counts are in the weights already: nothing is divided here."""
    finalize_model_grads(chunks, None, **kwargs)


def load_policy(config: RunConfig, folder: Path, platform: Platform) -> Policy:
    """Build the policy and load a Hugging Face folder into it.

    Raises ConfigError for an unsupported architecture, DataError for bad files.
    """
    hf = read_config(folder)
    check_architecture(hf, config.trainer)
    if config.model.lora is not None:
        check_lora(hf, config.model.lora)
    dtype, adapters = DTYPES[config.model.precision], Adapters.of(config.model.lora, folder)
    policy = build_policy(hf, platform, config.trainer, dtype, config.sampling.temperature, adapters, config.seed)
    load_hf(policy.model, hf, SafetensorsFolder(folder))
    # The distributed optimizer made its fp32 master copies when it was built: bring them up to date.
    policy.optimizer.reload_model_params()
    return policy
