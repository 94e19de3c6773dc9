"""What a rank of `async-grpo accept` computes twice: on the platform, and on the CPU without Megatron.

    collectives    small whole numbers of which every sum is known, with low digits that a narrower dtype would drop
    attention      inputs, output and gradients of the first layer are caught in a real pass, and computed again
                   sequence by sequence in float64: softmax(q k^T / sqrt(d)) v below the diagonal
    the model      log-probabilities and gradients of Hugging Face's model, in float64

Errors of the last two are relative to the size of the reference: |x - y| / |y|, in the Euclidean norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.batch.layout import PackedSequences, Rotation
from trainer.batch.sequences import MicroBatch
from trainer.model.hf_weights import export_hf
from trainer.model.policy import Policy, to_device
from trainer.ranks.distributed import broadcast_bytes, max_over_ranks, sum_over_ranks

HOST = "host"
_ITEMS = 8
_LOW_DIGIT = {torch.float64: 2.0**-40, torch.float32: 2.0**-16, torch.bfloat16: 0.0, torch.int64: 1 << 40}
"""Part of every value of a dtype: lost if the collective computes in a narrower one."""
DEVICE_DTYPES = (torch.float32, torch.bfloat16, torch.int64)
HOST_DTYPES = (torch.float32, torch.int64, torch.float64)
"""What ranks exchange on the host: batches, integers and statistics."""
_TINY_SHARE = 1e-3
"""A tensor whose gradient is a smaller share of the whole is measured by this share: some are 0 but for rounding."""


def collective_errors(device: str) -> dict[str, float | str]:
    """The largest error of each collective by name, or what it raised; all ranks call it together."""
    found: dict[str, float | str] = {}
    kinds = ((device, DEVICE_DTYPES, ON_DEVICE), (HOST, HOST_DTYPES, ON_HOST))
    for place, dtypes, operations in kinds:
        for dtype, operation in product(dtypes, operations):
            rows = [row.to("cpu" if place == HOST else device) for row in _values(dtype)]
            name = f"{operation.__name__} {str(dtype).removeprefix('torch.')} on the {place}"
            try:
                got, expected = operation(rows[dist.get_rank()].clone(), rows)
                found[name] = float((got.double().cpu() - expected.double().cpu()).abs().max())
            except Exception as error:  # of any library below torch
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def _values(dtype: torch.dtype) -> list[Tensor]:
    """What each rank contributes."""
    items, low = torch.arange(_ITEMS, dtype=torch.float64), _LOW_DIGIT[dtype]
    return [(items % 2 + rank % 2 + (rank + 1) * low).to(dtype) for rank in range(dist.get_world_size())]


def _sum(rows: list[Tensor]) -> Tensor:
    return torch.stack([row.cpu() for row in rows]).sum(0)


def all_reduce(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What came out, and what must come out; so do the others."""
    dist.all_reduce(own)
    return own, _sum(rows)


def broadcast(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """From the last rank."""
    dist.broadcast(own, len(rows) - 1)
    return own, rows[-1]


def all_gather(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Into one tensor."""
    found = own.new_empty(len(rows) * _ITEMS)
    dist.all_gather_into_tensor(found, own)
    return found, torch.cat(rows)


def reduce_scatter(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of as many copies as there are ranks."""
    found = torch.empty_like(own)
    dist.reduce_scatter_tensor(found, own.repeat(len(rows)))
    return found, _sum(rows)


def sum_of_the_trainer(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """With which the trainer sums statistics."""
    return sum_over_ranks(own), _sum(rows)


def maximum_of_the_trainer(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """With which it finds the largest."""
    return max_over_ranks(own), torch.stack(rows).amax(0)


def bytes_of_the_trainer(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """With which it hands out batches."""
    sent = broadcast_bytes(own.numpy().tobytes() if dist.get_rank() == 0 else None)
    return torch.frombuffer(bytearray(sent), dtype=own.dtype), rows[0]


ON_DEVICE = (all_reduce, broadcast, all_gather, reduce_scatter)
ON_HOST = (all_reduce, broadcast, all_gather, sum_of_the_trainer, maximum_of_the_trainer, bytes_of_the_trainer)
"""Without reduce_scatter, which not every gloo has: nothing on the host needs it."""


def logprobs_of(policy: Policy, batches: Sequence[MicroBatch]) -> Tensor:
    """Log-probabilities of the trained tokens, in the order of the batch."""
    found = policy.run(batches, lambda logprobs_N, _, part: (logprobs_N.sum(), (part.index_N, logprobs_N)), train=False)
    return _in_order(found)


def numeric_errors(policy: Policy, batches: Sequence[MicroBatch], model: Path, temperature: float) -> dict[str, float]:
    """Errors of the first layer's attention, of log-probabilities and of gradients, in one forward and backward."""
    policy.zero_grad()
    with CaughtAttention(policy) as caught:
        found = policy.run(batches, _weighed, train=True)
    logprobs_N, gradients = _in_order(found), _gradients(policy)
    policy.zero_grad()
    expected_N, expected = _reference(policy, batches, model, temperature)
    distance_N = (logprobs_N - expected_N).abs()
    return {
        **caught.errors(),
        "logprob_mean": float(distance_N.mean()),
        "logprob_max": float(distance_N.max()),
        "gradient": _worst_gradient(gradients, expected),
        "tokens": len(logprobs_N),
    }


def _weighed(logprobs_N: Tensor, _entropy: Tensor | None, part: MicroBatch) -> tuple[Tensor, Any]:
    """A loss that gives every token a gradient of its own."""
    return (logprobs_N * part.index_N.cos()).sum(), (part.index_N, logprobs_N.detach())


def _in_order(found: list[tuple[Tensor, Tensor]]) -> Tensor:
    index_N, values_N = (torch.cat(parts) for parts in zip(*found, strict=True))
    return values_N.detach().double()[index_N.argsort()]


class CaughtAttention:
    """Catches what goes into the attention of the first layer and comes out of it, gradients included."""

    def __init__(self, policy: Policy) -> None:
        self._module = policy.model.decoder.layers[0].self_attention.core_attention
        self._passes: list[tuple[list[Tensor], Tensor, PackedSequences]] = []

    def __enter__(self) -> CaughtAttention:
        self._handle = self._module.register_forward_hook(self._catch, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def errors(self) -> dict[str, float]:
        """Relative errors of the output and of the gradients of queries, keys and values."""
        pairs = [pair for caught in self._passes for pair in _attention_pairs(*caught)]
        return {
            name: max(_relative(found, expected) for kind, found, expected in pairs if kind == name)
            for name in ("attention", "attention_gradient")
        }

    def _catch(self, _module: Any, inputs: Any, named: dict[str, Any], output: Tensor) -> None:
        given = [*inputs[:3]] or [named[name] for name in ("query", "key", "value")]
        for tensor in (*given, output):
            tensor.retain_grad()
        self._passes.append((given, output, named["packed_seq_params"]))


def _attention_pairs(given: list[Tensor], output: Tensor, packed: PackedSequences) -> list[tuple[str, Tensor, Tensor]]:
    """(kind, found, expected) of one pass. Queries [T, heads, d]; keys and values [T, groups, d]."""
    query, key, value = (tensor.detach().double().cpu().flatten(2).requires_grad_() for tensor in given)
    share = query.shape[1] // key.shape[1]
    rotation = to_device(packed.rotation, "cpu")
    turned = [query, key] if rotation is None else [_turned(heads, rotation) for heads in (query, key)]
    outputs = []
    for start, end in pairwise([0, *packed.ends]):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (*turned, value))
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        unseen = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(unseen, -math.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    expected = torch.cat(outputs).flatten(1)
    assert output.grad is not None
    expected.backward(output.grad.double().cpu().reshape(expected.shape))
    gradients = [("attention_gradient", t.grad, e.grad) for t, e in zip(given, (query, key, value), strict=True)]
    return [("attention", output.detach(), expected.detach()), *gradients]


def _turned(heads: Tensor, rotation: Rotation) -> Tensor:
    """The halves of a head as real and imaginary part, turned by the angle of its position."""
    half = heads.shape[-1] // 2
    angle = torch.complex(rotation.cos.double(), rotation.sin.double())[..., :half]
    turned = torch.complex(heads[..., :half], heads[..., half:]) * angle
    return torch.cat((turned.real, turned.imag), -1)


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = found.double().cpu().reshape(expected.shape) - expected
    return float(difference.norm() / expected.norm())


def _gradients(policy: Policy) -> dict[str, Tensor]:
    """The gradients under Hugging Face's names: exported in place of the weights."""
    weights = [(parameter, parameter.data) for parameter in policy.model.parameters()]
    try:
        for parameter, weight in weights:
            parameter.data = parameter.main_grad.to(weight.dtype)
        return {name: tensor.double().cpu() for name, tensor in export_hf(policy.model, policy.hf)}
    finally:
        for parameter, weight in weights:
            parameter.data = weight


def _reference(
    policy: Policy, batches: Sequence[MicroBatch], model: Path, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients of Hugging Face's model with the same weights, in float64, one sequence at a
    time."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=policy.dtype, attn_implementation="eager").double()
    found = []
    for part in batches:
        ends = [0, *part.packing.ends]
        logits = [network(part.tokens_1T[:, start:end]).logits[0] for start, end in pairwise(ends)]
        all_NV = torch.cat(logits)[part.trained_N] / temperature
        logprobs_N = all_NV.log_softmax(-1).gather(1, part.labels_N[:, None])[:, 0]
        loss, handed_back = _weighed(logprobs_N, None, part)
        loss.backward()
        found.append(handed_back)
    return _in_order(found), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def _worst_gradient(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor's gradient; one that is missing counts as infinite."""
    if found.keys() != expected.keys():
        return math.inf
    whole = math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in expected.values()))
    errors = (
        (found[name] - tensor).norm() / max(float(tensor.norm()), _TINY_SHARE * whole)
        for name, tensor in expected.items()
    )
    return max(float(error) for error in errors)
