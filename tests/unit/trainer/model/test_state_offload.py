"""Masters and moments in the host's memory: the same numbers, and one parameter at a time on the device."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.errors import WaitTimeout
from trainer.model.optimizer_offload import StateOffload

SIZES = (4, 3, 5)


class CountsInGroup(torch.optim.AdamW):
    """As fused optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step()


def masters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).requires_grad_() for size in SIZES]


def megatron(inner: torch.optim.AdamW, of: list[Tensor]) -> Any:
    """A distributed optimizer, as far as the offload looks at it; every master is that of a whole parameter."""
    weights = [master.detach().bfloat16() for master in of]
    ranges = {id(each): {"param": SimpleNamespace(start=0, end=each.numel())} for each in weights}
    return SimpleNamespace(
        optimizer=inner,
        shard_fp32_from_float16_groups=[of],
        model_float16_groups=[weights],
        _get_model_param_range_map=lambda parameter: ranges[id(parameter)],
    )


def give_gradients(to: list[Tensor], step: int) -> None:
    for place, master in enumerate(to):
        master.grad = torch.full(master.shape, 0.1 * (place + 1) * (-1) ** step)


def in_two_groups(of: list[Tensor], kind: type[torch.optim.AdamW] = torch.optim.AdamW) -> torch.optim.AdamW:
    return kind([{"params": of[:2], "lr": 0.1}, {"params": of[2:], "weight_decay": 0.5}], lr=0.01)


def test_steps_are_those_of_adamw_and_only_one_master_is_fetched_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kept = masters(), masters()
    reference, inner = in_two_groups(plain), in_two_groups(kept)
    distributed = megatron(inner, kept)
    offload = StateOffload(distributed, "cpu")
    homes = [master.data_ptr() for master in kept]
    fetched: list[list[int]] = []
    step_of_torch = torch.optim.AdamW.step

    def watched(optimizer: torch.optim.AdamW) -> None:
        if optimizer is inner:
            fetched.append([place for place, one in enumerate(kept) if one.untyped_storage().nbytes() > 4])
        step_of_torch(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    for step in range(3):
        give_gradients(plain, step)
        reference.step()
        with offload.on_device():
            give_gradients(kept, step)
            inner.step()
        assert [one.tolist() for one in kept] == [one.tolist() for one in plain]
        (weights,) = distributed.model_float16_groups
        assert all(torch.equal(one, other.bfloat16()) for one, other in zip(weights, plain, strict=True))
    assert [master.data_ptr() for master in kept] == homes
    # A parameter that was updated is at home again, with the memory of its own.
    assert fetched == 3 * [[0], [0, 1], [0, 1, 2]]
    for one, other in zip(plain, kept, strict=True):
        assert all(torch.equal(inner.state[other][name], value) for name, value in reference.state[one].items())


def test_an_update_that_is_given_up_leaves_the_masters_as_they_were() -> None:
    kept = masters()
    offload = StateOffload(megatron(in_two_groups(kept), kept), "cpu")
    with pytest.raises(ZeroDivisionError), offload.on_device():
        give_gradients(kept, 0)
        raise ZeroDivisionError
    assert [one.tolist() for one in kept] == [one.tolist() for one in masters()]
    assert all(one.grad is None for one in kept)


def test_an_optimizer_that_counts_the_steps_of_a_group_counts_each_once() -> None:
    kept = masters()
    inner = in_two_groups(kept, CountsInGroup)
    offload = StateOffload(megatron(inner, kept), "cpu")
    for step in range(2):
        with offload.on_device():
            give_gradients(kept, step)
            inner.step()
    assert [group["step"] for group in inner.param_groups] == [2, 2]


def test_an_update_waits_until_a_checkpoint_has_written_what_it_was_lent() -> None:
    kept, written = masters(), threading.Event()
    offload = StateOffload(megatron(in_two_groups(kept), kept), "cpu")
    before = [master.detach().clone() for master in kept]
    homes = offload.lend_host_tensors(written, timeout_s=0.01)
    assert {home.data_ptr() for home in homes} >= {master.data_ptr() for master in kept}

    with pytest.raises(WaitTimeout), offload.on_device():
        pass
    assert all(torch.equal(master, value) for master, value in zip(kept, before, strict=True))

    written.set()
    with offload.on_device():
        give_gradients(kept, 0)
