"""The policy being trained: Megatron's model, DDP and distributed optimizer in one object.

    MicroBatch (CPU) --select_rank_tokens, to_device--> network --> logits of the trained positions
        loss (CPU) <--to_device-- log-probabilities [, entropy] <--------+

Batches are built on the CPU. The inputs of a micro-batch are copied to the device just before its forward pass, and the
log-probabilities are copied back, because all platforms evaluate the objective on the CPU. It needs only a few numbers
per token, and statistics in float64, which not every accelerator supports. Host and device synchronize once per
micro-batch.

The entropy H of the next-token distribution is computed on vocabulary slices, one per tensor-parallel rank:

    H = log Z - sum_v p_v l_v      with three small reductions: the peak, Z and the sum
    dH / dl_v = -p_v (log p_v + H) needs only this rank's slice

With data parallelism, gradients are summed bucket by bucket while the last backward pass of a step is still running.
Megatron's counterpart for weights, `overlap_param_gather`, is not used: it gathers a layer's new weights only when the
next forward pass reaches the layer, but we publish a version, and sync the reference, immediately after the update.
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
from trainer.batch.sequences import KeptTokens, MicroBatch
from trainer.model.builder import DTYPES, build_model
from trainer.model.checks import check_architecture, check_lora
from trainer.model.hf_folder import SafetensorsFolder, read_config
from trainer.model.hf_weights import load_hf_tensors
from trainer.model.lora import Adapters, attach_adapters, export_merged, export_trained, sharded_state
from trainer.model.masked_logprobs import masked_logprobs
from trainer.model.optimizer import optimizer_settings, update_weights
from trainer.model.optimizer_offload import StateOffload
from trainer.platform import Platform

T = TypeVar("T")

LossFunction = Callable[[Tensor, Tensor | None, MicroBatch], tuple[Tensor, Any]]
"""(logprobs_N, entropy_N if requested, micro-batch) -> (loss to differentiate, result for `run_micro_batches`)."""


def divide_in_place(tensor: Tensor, divisor: float) -> Tensor:
    """Divide a tensor in place, and its gradient in place in the backward pass. Saves two copies of the logits."""
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
    """Entropy of each row in nats, [N], with gradient.

    The caller may overwrite `logits_NV` afterwards: the backward pass uses its own buffer of probabilities.
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
    """Copy `value` to `device`: a tensor, or nested dataclasses, tuples and lists of tensors.

    Tensors already on the device are not copied; other values are returned unchanged. Gradients flow back through the
    copy. The host waits only for copies to the CPU. Copies to a device are queued from pinned memory, in the order of
    the device's work.
    """
    result: Any = value
    if isinstance(value, Tensor):
        from_host = value.device.type == "cpu" and torch.device(device).type != "cpu"
        source = value.pin_memory() if from_host and not value.requires_grad else value
        result = source.to(device, non_blocking=from_host)
    elif isinstance(value, tuple | list):
        result = type(value)(to_device(item, device) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        result = dataclasses.replace(value, **{name: to_device(item, device) for name, item in fields.items()})
    return result


class BackgroundReading:
    """A background thread that reads the weights while training continues; one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start_reading(self, read: Callable[[], None]) -> None:
        """Start `read` in a thread. Call `wait_until_read` for the previous one first."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(read,), name="reads the weights", daemon=True)
        self._thread.start()

    def wait_until_read(self) -> None:
        """Wait until the thread has ended, and raise its error if it failed. Call before changing the weights."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a failed thread, once. Does not wait."""
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise failure

    def _run(self, read: Callable[[], None]) -> None:
        try:
            read()
        except BaseException as error:
            self._failure = error


@dataclass(frozen=True, slots=True)
class Policy:
    """This rank's part of the policy. Call `wrapped`, Megatron's DDP; `model` is the GPTModel inside it."""

    hf: PretrainedConfig
    model: GPTModel
    wrapped: DistributedDataParallel
    optimizer: Any
    weight_decay: float
    temperature: float
    """Temperature of the sampler."""
    offload: StateOffload | None = None
    adapters: Adapters | None = None
    """LoRA adapters; only they are trained, the weights are frozen. None: all weights are trained."""
    repetition_penalty: float = 1.0
    """Repetition penalty of the sampler, applied under truncated sampling."""
    reading: BackgroundReading = field(default_factory=BackgroundReading)
    """Copies the weights of a version, overlapping the start of the next step."""
    shape: ModelShape = field(init=False)
    """Dimensions of the whole model."""

    def __post_init__(self) -> None:
        # Compute once, not per micro-batch: `shape_of` makes transformers copy its whole configuration.
        object.__setattr__(self, "shape", shape_of(self.hf))

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.model.config.params_dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    def run_micro_batches(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction,
        *,
        train: bool,
        entropy: bool = False,
        sum_over_ranks: bool = True,
    ) -> list[Any]:
        """Run the forward pass (with `train` also the backward pass) of the micro-batches through Megatron's schedule.

        Returns the results of `loss`, one per micro-batch, on the last pipeline stage; [] on the others.
        Gradients are summed over micro-batches and over the ranks with different tokens, without other scaling. `loss`
        receives the complete micro-batch even if context-parallel ranks split its sequences.
        Without `sum_over_ranks`, each rank accumulates its own gradients until `sum_gradients`.
        """
        config = self.model.config
        config.finalize_model_grads_func = _finalize if sum_over_ranks else None
        # Within `no_sync` no sum over ranks starts. The schedule leaves `no_sync` for its last backward pass. If that
        # is not the last pass of the step, later gradients are added to a bucket whose sum has already started.
        config.no_sync_func = self.wrapped.no_sync if train and sum_over_ranks else None
        without_sync = self.wrapped.no_sync() if train and not sum_over_ranks else nullcontext()
        with torch.set_grad_enabled(train), without_sync:
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

    def sum_gradients(self, scale: float) -> None:
        """Sum the gradients over the ranks and multiply them by `scale`. Call once, after the last backward pass."""
        if self.wrapped.ddp_config.overlap_grad_reduce:
            self.wrapped.start_grad_sync()  # no backward pass has started it: none was known to be the last
        _finalize([self.wrapped])
        self.wrapped.scale_gradients(scale)

    def zero_grad(self) -> None:
        """Clear the gradients, before the backward passes of a step."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update_weights(self, lr: float) -> float:
        """Make one optimizer update; see `trainer.model.optimizer.update_weights`."""
        self.reading.wait_until_read()
        return update_weights(self.optimizer, lr, self.weight_decay, self.offload)

    def export_merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors on rank 0, on the CPU, one at a time, with adapters added; see `gather_tensors`."""
        yield from export_merged(self.model, self.hf, self.adapters)

    def export_trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors on rank 0, on the CPU: only the adapters, if there are any."""
        yield from export_trained(self.model, self.hf, self.adapters)

    def sharded_state(self, metadata: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """Trained parameters as Megatron's sharded tensors of this rank; `prefix` is prepended to all names."""
        return sharded_state(self.model, self.hf, self.adapters, metadata, prefix)

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Load the trained parameters from a filled `sharded_state`."""
        self.reading.wait_until_read()
        self.model.load_state_dict(state, strict=self.adapters is None)

    def _forward(
        self, iterator: Iterator[MicroBatch], model: DistributedDataParallel, loss: LossFunction, entropy: bool
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        batch = next(iterator)
        context_rank = current_context_rank(self.model.config.sequence_parallel)
        own_tokens = to_device(select_rank_tokens(batch, context_rank), self.device)
        packing = replace(own_tokens.packing, trained=own_tokens.trained_M)
        output = model(own_tokens.tokens_1T, own_tokens.positions_1T, None, packed_seq_params=packing)

        def compute_loss(logits_1MV: Tensor) -> tuple[Tensor, Tensor, Any]:
            labels_M = own_tokens.select_own(to_device(batch.labels_N, self.device))
            entropy_M: Tensor | None
            if batch.kept is None:
                logprobs_M, entropy_M = self._full_logprobs(logits_1MV, labels_M, entropy)
            else:
                kept = KeptTokens(
                    own_tokens.select_own(to_device(batch.kept.ids_NW, self.device)),
                    own_tokens.select_own(to_device(batch.kept.repeated_NW, self.device)),
                )
                logprobs_M, entropy_M = masked_logprobs(
                    logits_1MV.flatten(0, 1),
                    labels_M,
                    kept,
                    temperature=self.temperature,
                    repetition_penalty=self.repetition_penalty,
                )

            count = len(batch.labels_N)
            entropy_N = own_tokens.merge(entropy_M, count) if entropy and entropy_M is not None else None
            logprobs_N, entropy_N = to_device((own_tokens.merge(logprobs_M, count), entropy_N), "cpu")
            value, result = loss(logprobs_N, entropy_N, batch)
            return to_device(value, self.device), torch.ones((), dtype=torch.int, device=self.device), result

        return output, compute_loss

    def _full_logprobs(self, logits_1MV: Tensor, labels_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the labels and, if wanted, entropies, over the whole vocabulary; [M]."""
        # float32 [M, V / tensor-parallel ranks]. Float16Module has already made a float32 copy of bfloat16 logits, and
        # `float32_logits` does not need its own again, so the division may overwrite them. Those of a float32 model are
        # Megatron's output layer's own and must be copied first.
        # (`flatten` is a view in both directions; the gradient of an index would be a copy.)
        writable = logits_1MV if self.dtype == torch.bfloat16 else logits_1MV.clone()
        logits_MV = divide_in_place(writable, self.temperature).flatten(0, 1)
        entropy_M = vocab_parallel_entropy(logits_MV) if entropy else None
        # Compute the cross-entropy last, because it overwrites the logits.
        return -vocab_parallel_cross_entropy(logits_MV, labels_M), entropy_M


def build_policy(
    hf: PretrainedConfig,
    platform: Platform,
    config: TrainerConfig,
    dtype: torch.dtype,
    temperature: float,
    adapters: Adapters | None = None,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    *,
    fp32_head: bool = False,
) -> Policy:
    """Build the model and optimizer of this rank. Load the weights before the first use of the optimizer.

    `temperature` and `repetition_penalty` are those of the sampler. `seed` initialises the adapters.
    """
    model = build_model(hf, platform, dtype, config, fp32_head=fp32_head)
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
    return Policy(
        hf=hf,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        weight_decay=config.optimizer.weight_decay,
        temperature=temperature,
        offload=offload,
        adapters=adapters,
        repetition_penalty=repetition_penalty,
    )


def _finalize(chunks: list[Any], _num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sum gradients over ranks. The token weights already contain the counts, so nothing is divided here."""
    finalize_model_grads(chunks, None, **kwargs)


def load_policy(config: RunConfig, folder: Path, platform: Platform) -> Policy:
    """Build the policy and load a Hugging Face folder into it.

    Raises ConfigError for an unsupported architecture, DataError for bad files.
    """
    hf = read_config(folder)
    check_architecture(hf, config.trainer)
    if config.model.lora is not None:
        check_lora(hf, config.model.lora)
    dtype = DTYPES[config.model.precision]
    adapters = Adapters.from_config(config.model.lora, folder)
    policy = build_policy(
        hf,
        platform,
        config.trainer,
        dtype,
        temperature=config.sampling.temperature,
        adapters=adapters,
        seed=config.seed,
        repetition_penalty=config.sampling.repetition_penalty,
        fp32_head=config.model.fp32_head,
    )
    load_hf_tensors(policy.model, hf, SafetensorsFolder(folder))
    # The distributed optimizer copied its fp32 masters from the random weights when it was built, so copy them again.
    policy.optimizer.reload_model_params()
    return policy
