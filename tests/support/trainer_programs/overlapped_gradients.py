"""Two data-parallel ranks make the same steps with sums of gradients that overlap the backward pass and without.

    python -m tests.support.trainer_programs.overlapped_gradients CASES.json

A case of `run_cases`: {"config": FILE, "model": FOLDER, "out": FILE}. Buckets are small, so there are many of them.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from async_grpo.config import RunConfig
from tests.support.trainer_programs.batches import make_batch
from tests.support.trainer_programs.running import run_cases
from trainer.platform import Platform

BUCKET = 500
"""Parameters of a bucket."""


def run(config: RunConfig, case: dict[str, Any], platform: Platform) -> None:
    found = {str(overlap): steps(config, Path(case["model"]), platform, overlap) for overlap in (False, True)}
    if _is_leader():
        Path(case["out"]).write_text(json.dumps(found))


def steps(config: RunConfig, model: Path, platform: Platform, overlap: bool) -> dict[str, Any]:
    """Bits of the weights after a whole step, a streamed one and another whole one, what was started when, and the
    number of buckets."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from async_grpo.telemetry.timeline import PhaseTimer
    from trainer.model import policy as module
    from trainer.step.step import train_step, train_step_streamed

    given = partial(module.DistributedDataParallelConfig, bucket_size=BUCKET)
    started: list[str] = []
    start = _ParamAndGradBucketGroup.start_grad_sync
    finish = _ParamAndGradBucketGroup.finish_grad_sync

    def noted(name: str, call: Any) -> Any:
        def noting(group: Any, *args: Any, **named: Any) -> Any:
            started.append(name)
            return call(group, *args, **named)

        return noting

    def options(**named: Any) -> Any:
        return given(**{**named, "overlap_grad_reduce": overlap and named["overlap_grad_reduce"]})

    with (
        patch.object(module, "DistributedDataParallelConfig", options),
        patch.object(_ParamAndGradBucketGroup, "start_grad_sync", noted("start", start)),
        patch.object(_ParamAndGradBucketGroup, "finish_grad_sync", noted("finish", finish)),
    ):
        policy = module.load_policy(config, model, platform)
        lr = config.trainer.optimizer.lr
        phases = PhaseTimer()
        orders = []
        norms = []
        for version in (0, 1, 2, 3):
            started.clear()
            batch = make_batch(version)
            if version == 2:
                parts = [replace(batch, groups=batch.groups[:1], missing=1), replace(batch, groups=batch.groups[1:])]
                values = train_step_streamed(policy, parts, config, version=version, lr=lr, phases=phases)
            else:
                values = train_step(policy, batch, config, lr=lr, phases=phases)
            orders.append("".join(name[0] for name in started))
            assert values is not None
            norms.append(values["grad_norm"])
        wrapped = policy.wrapped
        weights = {name: tensor.float().tolist() for name, tensor in policy.export_merged()}
    groups = wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups
    return {"weights": weights, "orders": orders, "norms": norms, "buckets": len(groups)}


def _is_leader() -> bool:
    from trainer.ranks.distributed import is_rank_zero

    return is_rank_zero()


if __name__ == "__main__":
    run_cases(run)
