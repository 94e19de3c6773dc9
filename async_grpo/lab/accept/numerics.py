"""Numerical checks of `async-grpo accept`: each value is computed on the platform and by a reference.

    collectives    small whole numbers with a known sum, plus low digits that a narrower dtype would lose
    attention      inputs, output and gradients of the first layer are recorded in a real pass and recomputed
                   sequence by sequence in float64: softmax(q k^T / sqrt(d)) v below the diagonal
    model          log-probabilities and gradients of the Hugging Face model in float64

The references run on the CPU without Megatron. Errors of attention and gradients are relative to the size of the
reference: |x - y| / |y| in the Euclidean norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.batch.layout import PackedSequences, Rotation
from trainer.batch.sequences import MicroBatch
from trainer.model.hf_weights import export_hf_tensors
from trainer.model.policy import Policy, to_device
from trainer.ranks.distributed import broadcast_bytes, max_over_ranks, sum_over_ranks

HOST = "host"
_ITEMS = 8
_LOW_DIGIT = {torch.float64: 2.0**-40, torch.float32: 2.0**-16, torch.bfloat16: 0.0, torch.int64: 1 << 40}
"""Part of every value of a dtype. It is lost if the collective computes in a narrower dtype."""
DEVICE_DTYPES = (torch.float32, torch.bfloat16, torch.int64)
HOST_DTYPES = (torch.float32, torch.int64, torch.float64)
"""Dtypes that ranks exchange on the host: batches, integers and statistics."""
_MIN_GRADIENT_FRACTION = 1e-3
"""Smallest denominator of a gradient's relative error, as a fraction of the norm over all tensors.

The exact gradient of some tensors is 0 (a key bias, for example), so theirs would be a ratio of two rounding errors.
"""

Collective = Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]]
"""(own tensor, tensors of all ranks) -> (received, expected)."""


def collective_errors(device: str) -> dict[str, float | str]:
    """Return the largest absolute error of each collective, or the exception that it raised.

    Collective: all ranks must call it.
    """
    errors: dict[str, float | str] = {}
    for location, dtypes, collectives in (
        (device, DEVICE_DTYPES, DEVICE_COLLECTIVES),
        (HOST, HOST_DTYPES, HOST_COLLECTIVES),
    ):
        for dtype in dtypes:
            for collective_name, collective in collectives.items():
                rows = [row.to("cpu" if location == HOST else device) for row in _rank_values(dtype)]
                name = f"{collective_name} {str(dtype).removeprefix('torch.')} on the {location}"
                try:
                    received, expected = collective(rows[dist.get_rank()].clone(), rows)
                    errors[name] = float((received.double().cpu() - expected.double().cpu()).abs().max())
                except Exception as error:  # any library below torch may raise, and the report must name it
                    errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return errors


def _rank_values(dtype: torch.dtype) -> list[Tensor]:
    """Return the tensor that each rank contributes."""
    items = torch.arange(_ITEMS, dtype=torch.float64)
    low_digit = _LOW_DIGIT[dtype]
    return [(items % 2 + rank % 2 + (rank + 1) * low_digit).to(dtype) for rank in range(dist.get_world_size())]


def _sum(rows: list[Tensor]) -> Tensor:
    return torch.stack([row.cpu() for row in rows]).sum(0)


def _run_all_reduce(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    dist.all_reduce(own)
    return own, _sum(rows)


def _run_broadcast(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Broadcast from the last rank."""
    dist.broadcast(own, len(rows) - 1)
    return own, rows[-1]


def _run_all_gather(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    gathered = own.new_empty(len(rows) * _ITEMS)
    dist.all_gather_into_tensor(gathered, own)
    return gathered, torch.cat(rows)


def _run_reduce_scatter(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Reduce-scatter `world_size` copies of the input."""
    scattered = torch.empty_like(own)
    dist.reduce_scatter_tensor(scattered, own.repeat(len(rows)))
    return scattered, _sum(rows)


def _run_sum_over_ranks(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum as the trainer sums statistics."""
    return sum_over_ranks(own), _sum(rows)


def _run_max_over_ranks(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    return max_over_ranks(own), torch.stack(rows).amax(0)


def _run_broadcast_bytes(own: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Broadcast raw bytes from rank 0, as the trainer does for batches."""
    payload = own.numpy().tobytes() if dist.get_rank() == 0 else None
    received = broadcast_bytes(payload)
    return torch.frombuffer(bytearray(received), dtype=own.dtype), rows[0]


DEVICE_COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _run_all_reduce,
    "broadcast": _run_broadcast,
    "all_gather": _run_all_gather,
    "reduce_scatter": _run_reduce_scatter,
}
HOST_COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _run_all_reduce,
    "broadcast": _run_broadcast,
    "all_gather": _run_all_gather,
    "sum_over_ranks": _run_sum_over_ranks,
    "max_over_ranks": _run_max_over_ranks,
    "broadcast_bytes": _run_broadcast_bytes,
}
"""Name in the report -> collective. No reduce_scatter: some gloo builds lack it, and nothing on the host needs it."""


def policy_logprobs(policy: Policy, batches: Sequence[MicroBatch]) -> Tensor:
    """Return the log-probabilities of the trained tokens, in the order of the batch."""

    def keep_logprobs(logprobs_N: Tensor, _entropy: Tensor | None, part: MicroBatch) -> tuple[Tensor, Any]:
        return logprobs_N.sum(), (part.index_N, logprobs_N)

    return _in_batch_order(policy.run_micro_batches(batches, keep_logprobs, train=False))


def numeric_errors(policy: Policy, batches: Sequence[MicroBatch], model: Path, temperature: float) -> dict[str, float]:
    """Return the errors of attention, log-probabilities and gradients over one forward and backward pass."""
    policy.zero_grad()
    with AttentionRecorder(policy) as attention:
        outputs = policy.run_micro_batches(batches, _weighted_loss, train=True)
    logprobs_N = _in_batch_order(outputs)
    gradients = _gradients(policy)
    policy.zero_grad()

    expected_logprobs_N, expected_gradients = _reference(policy, batches, model, temperature)
    distance_N = (logprobs_N - expected_logprobs_N).abs()
    return {
        **attention.errors(),
        "logprob_mean": float(distance_N.mean()),
        "logprob_max": float(distance_N.max()),
        "gradient": _largest_gradient_error(gradients, expected_gradients),
        "tokens": len(logprobs_N),
    }


def _weighted_loss(logprobs_N: Tensor, _entropy: Tensor | None, part: MicroBatch) -> tuple[Tensor, Any]:
    """Loss that gives every token a different gradient, so that swapped tokens cannot cancel out."""
    return (logprobs_N * part.index_N.cos()).sum(), (part.index_N, logprobs_N.detach())


def _in_batch_order(outputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Concatenate (index, value) pairs of the micro-batches and sort the values by index."""
    index_N, values_N = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return values_N.detach().double()[index_N.argsort()]


class AttentionRecorder:
    """Records inputs, output and gradients of the first layer's attention."""

    def __init__(self, policy: Policy) -> None:
        self._module = policy.model.decoder.layers[0].self_attention.core_attention
        self._passes: list[tuple[list[Tensor], Tensor, PackedSequences]] = []

    def __enter__(self) -> AttentionRecorder:
        self._handle = self._module.register_forward_hook(self._record, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def errors(self) -> dict[str, float]:
        """Return the relative errors of the output and of the gradients of queries, keys and values."""
        largest: dict[str, float] = {}
        for inputs, output, packed in self._passes:
            for kind, actual, expected in _attention_pairs(inputs, output, packed):
                error = _relative_error(actual, expected)
                largest[kind] = max(largest.get(kind, error), error)
        return largest

    def _record(self, _module: Any, positional: Any, named: dict[str, Any], output: Tensor) -> None:
        # Some callers pass queries, keys and values by name instead of by position.
        inputs = [*positional[:3]] or [named[name] for name in ("query", "key", "value")]
        for tensor in (*inputs, output):
            tensor.retain_grad()
        self._passes.append((inputs, output, named["packed_seq_params"]))


def _attention_pairs(inputs: list[Tensor], output: Tensor, packed: PackedSequences) -> list[tuple[str, Tensor, Tensor]]:
    """Return (kind, actual, expected) triples of one pass.

    Queries are [T, heads, d]; keys and values are [T, groups, d].
    """
    query, key, value = (tensor.detach().double().cpu().flatten(2).requires_grad_() for tensor in inputs)
    heads_per_group = query.shape[1] // key.shape[1]

    # The module applies the rotary embedding itself where `packed` carries it.
    rotated_query, rotated_key = query, key
    if packed.rotation is not None:
        rotation = to_device(packed.rotation, "cpu")
        rotated_query = _rotate(query, rotation)
        rotated_key = _rotate(key, rotation)

    outputs = []
    for start, end in pairwise([0, *packed.ends]):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (rotated_query, rotated_key, value))
        k = k.repeat_interleave(heads_per_group, 0)
        v = v.repeat_interleave(heads_per_group, 0)
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    expected = torch.cat(outputs).flatten(1)

    assert output.grad is not None
    expected.backward(output.grad.double().cpu().reshape(expected.shape))
    pairs = [("attention", output.detach(), expected.detach())]
    for actual_input, expected_input in zip(inputs, (query, key, value), strict=True):
        assert actual_input.grad is not None and expected_input.grad is not None
        pairs.append(("attention_gradient", actual_input.grad, expected_input.grad))
    return pairs


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each head by its position's angle; its two halves are the real and the imaginary part."""
    half = heads.shape[-1] // 2
    angle = torch.complex(rotation.cos.double(), rotation.sin.double())[..., :half]
    rotated = torch.complex(heads[..., :half], heads[..., half:]) * angle
    return torch.cat((rotated.real, rotated.imag), -1)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.double().cpu().reshape(expected.shape) - expected
    return float(difference.norm() / expected.norm())


def _gradients(policy: Policy) -> dict[str, Tensor]:
    """Return the gradients under their Hugging Face names.

    The export splits and renames fused weights, so we put the gradients where the weights are and export those.
    """
    weights = [(parameter, parameter.data) for parameter in policy.model.parameters()]
    try:
        for parameter, weight in weights:
            parameter.data = parameter.main_grad.to(weight.dtype)
        return {name: tensor.double().cpu() for name, tensor in export_hf_tensors(policy.model, policy.hf)}
    finally:
        for parameter, weight in weights:
            parameter.data = weight


def _reference(
    policy: Policy, batches: Sequence[MicroBatch], model: Path, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities and gradients of the Hugging Face model in float64, one sequence at a time.

    Weights are loaded in the policy's dtype first, so that rounding them is not part of the error.
    """
    network = AutoModelForCausalLM.from_pretrained(model, dtype=policy.dtype, attn_implementation="eager").double()
    outputs = []
    for part in batches:
        ends = [0, *part.packing.ends]
        logits = [network(part.tokens_1T[:, start:end]).logits[0] for start, end in pairwise(ends)]
        logits_NV = torch.cat(logits)[part.trained_N] / temperature
        logprobs_N = logits_NV.log_softmax(-1).gather(1, part.labels_N[:, None])[:, 0]
        loss, output = _weighted_loss(logprobs_N, None, part)
        loss.backward()
        outputs.append(output)

    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return _in_batch_order(outputs), gradients


def _largest_gradient_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of any tensor's gradient; infinity if a tensor is missing."""
    if actual.keys() != expected.keys():
        return math.inf
    total_norm = math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in expected.values()))
    errors = []
    for name, tensor in expected.items():
        scale = max(float(tensor.norm()), _MIN_GRADIENT_FRACTION * total_norm)
        errors.append(float((actual[name] - tensor).norm() / scale))
    return max(errors)
