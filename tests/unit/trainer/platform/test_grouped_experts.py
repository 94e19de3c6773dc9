"""Experts as grouped products are Megatron's SequentialMLP: outputs, gradients, checkpoints, Hugging Face tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.support import npu_operators
from tests.support.layer_syncs import Copies
from tests.support.tolerances import assert_equal_up_to_rounding
from trainer.model.weight_map import find_weight
from trainer.platform import cuda, npu
from trainer.platform.base import LayerRole
from trainer.platform.grouped_experts import GroupedExperts, NpuGroupedExperts, permute_without_waiting

HIDDEN, INNER, EXPERTS = 16, 24, 4
COUNTS = [5, 0, 9, 2]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "torch_npu", npu_operators)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def moe_config(dtype: torch.dtype = torch.float32, **more: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=INNER,
        ffn_hidden_size=INNER,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        perform_initialization=False,
        **more,
    )


def both(kind: type[GroupedExperts], dtype: torch.dtype = torch.float32) -> tuple[GroupedExperts, SequentialMLP]:
    """The two forms with the same weights."""
    backend = LocalSpecProvider()
    linears = {"linear_fc1": backend.column_parallel_linear(), "linear_fc2": backend.row_parallel_linear()}
    submodules = MLPSubmodules(**linears)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = moe_config(dtype)
    grouped = kind(EXPERTS, config, submodules, groups)
    sequential = SequentialMLP(EXPERTS, config, submodules, groups)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(grouped.named_parameters(prefix="mlp.experts"))
    with torch.no_grad():
        for name, parameter in sequential.named_parameters(prefix="mlp.experts"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
            find_weight(name, parameters)[1].copy_(parameter)
    return grouped, sequential


@pytest.mark.parametrize("kind", [GroupedExperts, NpuGroupedExperts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 16], [0, 0, 0, 0]])
def test_outputs_and_gradients_are_those_of_single_experts(
    kind: type[GroupedExperts], dtype: torch.dtype, counts: list[int]
) -> None:
    experts, generator = both(kind, dtype), torch.Generator().manual_seed(1)
    tokens = torch.randn(sum(counts), HIDDEN, generator=generator).to(dtype)
    probabilities = torch.rand(sum(counts), generator=generator)
    results = []
    for module in experts:
        given = [tokens.clone().requires_grad_(), probabilities.clone().requires_grad_()]
        out, bias = module(given[0], torch.tensor(counts), given[1])
        assert bias is None
        (out.float() ** 2).sum().backward()
        results.append((out, *(each.grad for each in given), dict(module.named_parameters(prefix="mlp.experts"))))
    (*found, parameters), (*expected, singles) = results
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal_up_to_rounding(mine, theirs, terms=HIDDEN * max(1, sum(counts)))
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    for name, single in singles.items():
        assert single.grad is not None
        assert_equal_up_to_rounding(find_weight(name, gradients)[1], single.grad, terms=HIDDEN * max(1, sum(counts)))


@pytest.mark.parametrize("of_optimizer", [False, True])
def test_a_checkpoint_holds_the_same_tensors(of_optimizer: bool) -> None:
    """Also of the optimizer, whose state of a parameter Megatron gives to the same factory, under another key."""
    stored = []
    for module in both(GroupedExperts):
        state = module.sharded_state_dict("layers.mlp.experts.", ((0, 3, 8),), {})
        parts: dict[Any, torch.Tensor] = {}
        for entry in state.values():
            built = entry
            if isinstance(entry, ShardedTensorFactory):
                flat = entry.data.detach().reshape(-1) if of_optimizer else entry.data
                key = f"exp_avg.{entry.key}" if of_optimizer else entry.key
                shaped = flat if isinstance(module, GroupedExperts) else entry.data
                built = entry.build_fn(key, shaped, entry.replica_id, None)
                assert torch.equal(entry.merge_fn([part.data for part in built]), entry.data)
            for part in built if isinstance(built, list) else [built]:
                place = (part.key.removeprefix("exp_avg."), part.global_shape, part.global_offset, part.replica_id)
                pieces = getattr(part, "axis_fragmentations", None)  # None: an empty object beside a weight
                parts[(*place, pieces)] = torch.empty(0) if pieces is None else part.data
        stored.append(parts)
    mine, theirs = stored
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[place], theirs[place]) for place in mine)


@pytest.mark.parametrize(
    ("capability", "dtype", "hidden", "grouped"),
    [
        ((9, 0), torch.bfloat16, HIDDEN, True),
        ((8, 0), torch.bfloat16, HIDDEN, False),
        ((9, 0), torch.float32, HIDDEN, False),
        ((9, 0), torch.bfloat16, 12, False),
    ],
)
def test_a_gpu_has_grouped_experts_where_torch_has_a_kernel_for_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, hidden: int, grouped: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    platform, config = cuda.CudaPlatform(), moe_config(dtype, bf16=dtype == torch.bfloat16)
    config.hidden_size = hidden
    assert (platform.layer_replacements(config).get(LayerRole.experts) is GroupedExperts) is grouped
    assert ("grouped_mm" in platform.experts) is grouped
    config.num_moe_experts = None
    assert LayerRole.experts not in platform.layer_replacements(config)


def test_an_npu_has_grouped_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "import_package", lambda *_: SimpleNamespace(PTNorm=torch.nn.Identity))
    platform = npu.NpuPlatform()
    assert platform.layer_replacements(moe_config())[LayerRole.experts] is NpuGroupedExperts
    assert "npu_grouped_matmul" in platform.experts


def test_tokens_are_sorted_by_expert_as_megatron_sorts_them_and_without_waiting() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(50, EXPERTS, generator=generator)
    routing_map = torch.zeros(50, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(2, dim=1).indices, True)
    results = []
    for permute in (permute_without_waiting, moe_utils.permute):
        tokens, probs = torch.arange(150.0).view(50, 3).requires_grad_(), (scores * routing_map).requires_grad_()
        found = permute(tokens, routing_map, probs=probs, num_out_tokens=100)
        weights = torch.arange(100.0)
        gradients = torch.autograd.grad((found[0].sum(1) * weights * found[1]).sum(), (tokens, probs))
        results.append((*found, *gradients))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)

    with Copies() as copies:  # on a device without numbers, anything that needs one raises
        placed = (tensor.to("meta") for tensor in (torch.zeros(50, 3), routing_map, scores))
        permute_without_waiting(*placed, num_out_tokens=100)
    assert copies.count == 3  # those of this test


@pytest.mark.parametrize("kind", [GroupedExperts, NpuGroupedExperts])
def test_grouped_experts_never_wait_for_the_device(kind: type[GroupedExperts], monkeypatch: pytest.MonkeyPatch) -> None:
    def product(left: Any, right: Any, *, group_list: Any, group_type: int, **_: Any) -> list[torch.Tensor]:
        if group_type == 0:
            return [left[0].new_empty(len(left[0]), right[0].shape[2])]
        return [left[0].new_empty(len(group_list), len(left[0]), right[0].shape[1])]

    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_grouped_matmul=product))  # type: ignore[arg-type]
    experts = both(kind, torch.bfloat16)[0].to("meta")
    tokens = torch.empty(16, HIDDEN, device="meta", dtype=torch.bfloat16, requires_grad=True)
    probabilities = torch.empty(16, device="meta")
    counts = torch.tensor([5, 0, 9, 2])  # on the host, where Megatron needs them for the exchange
    with Copies() as copies:
        out, _ = experts(tokens, counts, probabilities)
        (out * out).sum().backward()
    assert copies.count == 1  # of the offsets, to the device
