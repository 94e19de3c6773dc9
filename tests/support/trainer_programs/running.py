"""One case after another in one start of the ranks, which is most of the time. The list is the program's argument."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig, load
from trainer.platform import Platform, select_platform
from trainer.platform.base import LayerRole
from trainer.platform.cpu import CpuPlatform

MINDSPEED_VARIABLE = "TRAINER_PROGRAM_MINDSPEED"
"""Environment variable: the folder of MindSpeed under whose patches the ranks run; without it there are none."""

GROUPED_VARIABLE = "TRAINER_PROGRAM_GROUPED"
"""Environment variable: set where the ranks compute experts by grouped matrix products, as on a device."""


class GroupedCpu(CpuPlatform):
    """The CPU with the experts of a GPU: torch's `grouped_mm`, which is a loop there."""

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        from trainer.platform.grouped_experts import GroupedExperts

        return {**super().layer_replacements(config), LayerRole.experts: GroupedExperts}


def _platform(name: str) -> Platform:
    if source := os.environ.get(MINDSPEED_VARIABLE):
        from tests.support.mindspeed import NpuOnCpu

        return NpuOnCpu(Path(source))
    if os.environ.get(GROUPED_VARIABLE):
        return GroupedCpu()
    return select_platform(name)


def run_cases(run: Callable[[RunConfig, dict[str, Any], Platform], None]) -> None:
    """A case is a JSON object; `config` in it names its configuration, whose layout the ranks take for it.

    Cases of one layout run one after another, in the order of the list.
    """
    cases = json.loads(Path(sys.argv[1]).read_text())
    listed = [(load(Path(case["config"])), case) for case in cases]
    listed.sort(key=lambda each: _layout(each[0]))  # a layout has threads and sockets of its own, which stay
    first = listed[0][0]
    platform = _platform(first.trainer.platform)
    platform.activate(first.trainer)
    refuse_doubles()
    from megatron.core import parallel_state

    from trainer.ranks.distributed import lay_out, start_ranks, stop_ranks

    start_ranks(first.trainer, platform, first.seed, 60.0)
    present = _layout(first)
    for config, case in listed:
        if present != _layout(config):
            parallel_state.destroy_model_parallel()
            lay_out(config.trainer, config.seed)
            present = _layout(config)
        run(config, case, platform)
    stop_ranks()


def refuse_doubles() -> None:
    """Let `all_reduce` fail for numbers of 64 bits that are no integers: under MindSpeed's patches their sum is lost
    without an error, and HCCL cannot compute it. `trainer.ranks.distributed.sum_over_ranks` does what is wanted."""
    import torch
    import torch.distributed as dist

    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if tensor.dtype in (torch.float64, torch.complex64, torch.complex128):
            raise TypeError(f"all_reduce of {tensor.dtype}: MindSpeed drops the result; use sum_over_ranks")
        return reduce(tensor, *arguments, **options)

    dist.all_reduce = all_reduce


def _layout(config: RunConfig) -> tuple[int, ...]:
    trainer = config.trainer
    return (
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.context_parallel,
        trainer.expert_parallel,
    )
