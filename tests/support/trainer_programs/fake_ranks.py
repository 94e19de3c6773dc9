"""Ranks of a large layout, one after another in one process: tensors have shapes and no numbers, nothing is sent.

    python -m tests.support.trainer_programs.fake_ranks CASES.json OUT.json

A case: {"config": FILE, "shape": fields of config.json, "ranks": [RANK, ...]}. For each of them `OUT.json` has what
`Found` says: the model, gradients and optimizer of the rank are built as the trainer does, and the rank makes a step
on micro-batches that are all full, of sequences of equal length.

Tensors of the model are torch's fake tensors, and those of the batch are real until they would go to the device. Groups
are torch's "fake" process groups. What depends on numbers is decided here: a number that is read from the device is 1,
and tokens spread over experts evenly.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_grpo.config import RunConfig, load
from async_grpo.wire import Batch, Group, Sample, Task, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from trainer.platform import cuda, npu, select_platform
from trainer.platform.base import LayerRole
from trainer.platform.cpu import CpuPlatform

PROMPT = 1
COMPLETION = 1024
"""Tokens of a sequence, of which the network reads all but the last: eight of them fill a micro-batch of 8,192."""
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "_all_gather_base"),
    *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all_single", "barrier"),
    *POINT_TO_POINT,
)


@dataclasses.dataclass
class Found:
    """Of one rank; bytes of its device."""

    parameters: dict[str, list[int]]
    """The shape of each parameter by its name in the model."""
    weights: int
    gradients: int
    optimizer: int
    peak: int
    """The most that a step has beside these: activations, logits and what is short-lived."""
    micro_batches: int
    collectives: list[list[Any]]
    """Those of the step, in order: name, ranks of the group, elements of the larger tensor, dtype, and the other rank
    of two."""


class Meter(TorchDispatchMode):
    """Counts the bytes of the storages that live; a number that is read is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, FakeTensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return found

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


class _Done:
    """A collective that has ended."""

    def wait(self, *_arguments: Any) -> None: ...


class Recorder:
    """Takes the place of the collectives of torch.distributed."""

    def __init__(self) -> None:
        self.found: list[list[Any]] = []

    def install(self) -> None:
        for name in COLLECTIVES:
            setattr(dist, name, self._recording(name))
        dist.all_gather_object = lambda found, own, group=None: found.__setitem__(slice(None), [own] * len(found))
        dist.P2POp = lambda *given: given  # type: ignore[misc, assignment]
        dist.batch_isend_irecv = lambda operations: [call(*given) for call, *given in operations]  # type: ignore[assignment]
        new_group = dist.new_group
        dist.new_group = lambda *given, **named: new_group(*given, **named | {"backend": "fake"})

        @contextmanager
        def coalescing(*_arguments: Any, **_options: Any) -> Iterator[_Done]:
            yield _Done()

        dist._coalescing_manager = coalescing  # type: ignore[attr-defined]

    def _recording(self, name: str) -> Callable[..., _Done]:
        def record(*given: Any, **named: Any) -> _Done:
            values = tree_leaves((given, named))
            tensors = [each for each in values if isinstance(each, torch.Tensor)]
            group = next((each for each in values if isinstance(each, dist.ProcessGroup)), dist.group.WORLD)
            peer = [each for each in values if type(each) is int][:1] if name in POINT_TO_POINT else []
            size = max((tensor.numel() for tensor in tensors), default=0)
            dtype = str(tensors[0].dtype) if tensors else ""
            self.found.append([name, dist.get_process_group_ranks(group), size, dtype, *peer])
            return _Done()

        return record


def make_batch(samples: int, group_size: int) -> Batch:
    """Full groups of equal sequences."""
    tokens = tokens_to_bytes(np.ones(COMPLETION, np.int32))
    logprobs = logprobs_to_bytes(np.zeros(COMPLETION))
    task = Task(index=0, prompt="", prompt_tokens=tokens_to_bytes(np.ones(PROMPT, np.int32)), answer="")
    members = [
        Sample(tokens=tokens, logprobs=logprobs, spans=[VersionSpan(0, 0, COMPLETION)], reward=float(place % 2))
        for place in range(group_size)
    ]
    groups = [Group(seq=number, attempt=1, task=task, samples=members) for number in range(samples // group_size)]
    return Batch(epoch=1, version=0, groups=groups)


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with real tensors, although fake ones are made around it."""

    def call(*given: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return function(*given, **named)

    return call


def patch(mode: FakeTensorMode) -> None:
    """Keep batches real up to `to_device`, and decide what Megatron reads from tensors."""
    import trainer.model.policy as policy
    import trainer.step.precompute as precompute
    import trainer.step.step as step

    for name in ("build_micro_batches", "own_micro_batches", "reweight_sequences"):
        setattr(step, name, on_host(getattr(step, name)))
    for name in ("build_micro_batches", "build_sequences", "stack_trained_tokens"):
        setattr(precompute, name, on_host(getattr(precompute, name)))
    policy.select_rank_tokens = on_host(policy.select_rank_tokens)  # type: ignore[attr-defined]
    policy.to_device = lambda value, device: faked(value, mode)  # type: ignore[assignment]
    torch.nn.Module._apply = lambda self, function, recurse=True: self  # type: ignore[method-assign, assignment]
    listed = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return listed(tensor)
        return np.ones(tuple(tensor.shape)).tolist()

    torch.Tensor.tolist = tolist  # type: ignore[method-assign]
    _patch_megatron()


def _patch_megatron() -> None:
    import megatron.core.optimizer.clip_grads as clipping
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    clipping.l2_norm_impl = lambda *_arguments: (torch.ones(1), None)
    dispatcher.MoEAlltoAllTokenDispatcher.preprocess = _spread_evenly
    exchange = P2PCommunicator._communicate_shapes

    def shapes(self: Any, *given: Any) -> list[list[int]]:
        config = self.config
        tokens = exchange(self, *given) and FULL["tokens"]
        between = config.tensor_model_parallel_size if config.sequence_parallel else 1
        rows = tokens // config.context_parallel_size // between
        return [[rows, 1, config.hidden_size] if wanted else [0, 0, 0] for wanted in given[2:]]

    P2PCommunicator._communicate_shapes = shapes


FULL = {"tokens": 0}
"""Tokens of a micro-batch of the present case."""


def _spread_evenly(self: Any, routing_map: torch.Tensor) -> Any:
    """Megatron's method of this name, where every expert gets as many tokens as the others."""
    chosen = routing_map.size(0) * self.config.moe_router_topk
    dispatcher_group = self.tp_ep_group
    if self.ep_size > 1:
        dist.all_gather_into_tensor(routing_map.sum(0), group=dispatcher_group)
    self.num_out_tokens = chosen
    self.input_splits = self.output_splits = [chosen // self.ep_size] * self.ep_size
    each = chosen // self.num_experts
    self.num_global_tokens_per_local_expert = np.full((self.ep_size, self.num_local_experts), each)
    return np.full(self.num_local_experts, each * self.ep_size)


def _grouped_product(
    left: list[torch.Tensor], right: list[torch.Tensor], *, group_list: torch.Tensor, group_type: int, **_: Any
) -> list[torch.Tensor]:
    """npu_grouped_matmul by the shape of its result."""
    if group_type == 0:
        return [left[0].new_empty(left[0].shape[0], right[0].shape[2])]
    return [left[0].new_empty(len(group_list), left[0].shape[0], right[0].shape[1])]


class Kernel(torch.autograd.Function):
    """A fused kernel by what it keeps for its backward pass: its inputs, its result if `own`, and numbers in
    float32."""

    @staticmethod
    def forward(context: Any, own: bool, numbers: int, *inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs[0])
        kept = (*inputs, inputs[0].new_empty(numbers, dtype=torch.float32), *([out] if own else []))
        context.save_for_backward(*kept)
        context.count = len(inputs)
        return out

    @staticmethod
    def backward(context: Any, *_gradients: Any) -> Any:
        return (None, None, *(torch.empty_like(each) for each in context.saved_tensors[: context.count]))


class Norm(torch.nn.Module):
    """RMSNorm by one kernel."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]"""
        return Kernel.apply(False, x.numel() // x.shape[-1], x, self.weight)


class FakePlatform(CpuPlatform):
    """The layers and options of a platform, with its kernels by what they keep.

    torch_npu: npu_fusion_attention keeps two numbers, eight times each, for every head and token (its schema's
    softmax_max and softmax_sum, [T, heads, 8]); npu_rotary_mul keeps what it rotates.
    """

    def __init__(self, name: str) -> None:
        self._like = select_platform(name)
        operators = types.ModuleType("torch_npu")
        operators.npu_fusion_attention = lambda query, key, value, heads, **_: (  # type: ignore[attr-defined]
            Kernel.apply(True, len(query) * heads * 16, query, key, value),
        )
        operators.npu_rotary_mul = lambda *inputs: Kernel.apply(False, 0, *inputs)  # type: ignore[attr-defined]
        operators.npu_grouped_matmul = _grouped_product  # type: ignore[attr-defined]
        sys.modules["torch_npu"] = operators
        npu.import_package = lambda *_: types.SimpleNamespace(PTNorm=Norm)  # type: ignore[attr-defined]
        cuda.can_compile = lambda: True
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]

    def model_options(self, *, experts: bool) -> Mapping[str, Any]:
        return {**self._like.model_options(experts=experts), "perform_initialization": False}

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        return {LayerRole.norm: Norm, **self._like.layer_replacements(config)}


def faked(value: Any, mode: FakeTensorMode) -> Any:
    """The same structure with tensors that have no numbers."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, FakeTensor) else mode.from_tensor(value)
    if isinstance(value, tuple | list):
        return type(value)(faked(part, mode) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: faked(part, mode) for name, part in parts.items()})
    return value


def run(config: RunConfig, hf: Any, rank: int, recorder: Recorder, mode: FakeTensorMode) -> Found:
    from megatron.core import parallel_state

    from async_grpo.telemetry.timeline import PhaseTimer
    from trainer.batch.packing import own_micro_batches
    from trainer.model.builder import DTYPES
    from trainer.model.optimizer_state import parameter_states, prepare_for_checkpoint
    from trainer.model.policy import build_policy
    from trainer.ranks.distributed import lay_out
    from trainer.step.step import train_step

    trainer = config.trainer
    dist.init_process_group("fake", rank=rank, world_size=trainer.processes, store=FakeStore())
    lay_out(trainer, config.seed)
    meter = Meter()
    FULL["tokens"] = trainer.micro_batch_tokens
    samples = trainer.micro_batch_tokens * 2 * trainer.pipeline_parallel // (PROMPT + COMPLETION - 1)
    batch = make_batch(samples * parallel_state.get_data_parallel_world_size(), group_size=2)
    with mode, meter:
        policy = build_policy(
            hf,
            FakePlatform(trainer.platform),
            trainer,
            DTYPES[config.model.precision],
            1.0,
            fp32_head=config.model.fp32_head,
        )
        prepare_for_checkpoint(policy.optimizer)
        if policy.offload is not None:
            policy.offload.move_to_host()  # what the host keeps is there before the step, and not counted in it
        own = {id(parameter) for parameter in policy.model.parameters()}
        kept = [
            tensor
            for parameter, state in parameter_states(policy.optimizer)
            for tensor in (parameter, *state.values())
            if id(tensor) not in own and tensor.dim()
        ]
        live = meter.live
        meter.peak = 0
        recorder.found = []
        train_step(policy, batch, config, lr=1e-6, phases=PhaseTimer())
    found = Found(
        parameters={name: list(tensor.shape) for name, tensor in policy.model.named_parameters()},
        weights=sum(tensor.nbytes for tensor in policy.model.parameters()),
        gradients=sum(
            buffer.grad_data.nbytes for buffer in [*policy.wrapped.buffers, *policy.wrapped.expert_parallel_buffers]
        ),
        optimizer=sum(tensor.nbytes for tensor in kept),
        peak=meter.peak - live,
        micro_batches=len(own_micro_batches(batch, config)),
        collectives=recorder.found,
    )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def main() -> None:
    """The cases, in their order."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    recorder = Recorder()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder.install()
    configs = [load(Path(case["config"])) for case in cases]
    select_platform("cpu").activate(configs[0].trainer)
    patch(mode)
    from transformers import AutoConfig

    found = []
    for case, config in zip(cases, configs, strict=True):
        hf = AutoConfig.for_model(**case["shape"])
        found.append([dataclasses.asdict(run(config, hf, rank, recorder, mode)) for rank in case["ranks"]])
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
