"""Train a few steps, in one case after another, and write down what can be compared.

    python -m tests.support.trainer_programs.train_steps CASES.json

A case: {"config": FILE, "model": FOLDER, "out": FILE, "save_at": V | null, "resume": bool,
"poisoned": bool}, and if needed "versions": V, where to stop, and "die": true, the end by SIGKILL.
`out` gets losses, gradient norms, log-probabilities and the error that ended the steps, if any, as
JSON; the weights lie beside it.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig
from async_grpo.errors import TrainingError
from tests.support.trainer_programs.running import run_cases
from trainer.platform import Platform

VERSIONS = 4


def run(config: RunConfig, case: dict[str, Any], platform: Platform) -> None:
    from safetensors.torch import save_file

    from async_grpo.telemetry.timeline import PhaseTimer
    from tests.support.trainer_programs.batches import make_batch
    from trainer.checkpoint.folder import CheckpointFolder
    from trainer.distributed import is_leader
    from trainer.model.policy import load_policy
    from trainer.step.step import train_step

    policy = load_policy(config, Path(case["model"]), platform)
    untouched = {name: tensor.clone() for name, tensor in policy.export()}
    checkpoints = CheckpointFolder(config.run_dir / "checkpoints", config.trainer.checkpoint)
    first = 0
    if case["resume"]:
        newest = checkpoints.newest()
        assert newest is not None
        checkpoints.load(policy, newest)
        first = newest
    found: dict[str, Any] = {"first": first, "logprobs": logprobs(policy, config), "steps": []}
    after_one = untouched
    for version in range(first, case.get("versions", VERSIONS)):
        batch = make_batch(version, poisoned=case["poisoned"])
        try:
            result = train_step(policy, batch, config, lr=config.trainer.optimizer.lr, phases=PhaseTimer())
        except TrainingError as error:
            found["refused"] = str(error)
            break
        found["steps"].append(
            {"loss": result["loss"], "grad_norm": result["grad_norm"], "tokens": result["trained_tokens"]}
        )
        if version == first:
            after_one = {name: tensor.clone() for name, tensor in policy.export()}
        if version + 1 == case["save_at"]:
            checkpoints.save(policy, version + 1, epoch=1)
    checkpoints.poll_saved(wait=True)
    if case.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    trained = {name: tensor.clone() for name, tensor in policy.export()}
    if is_leader():
        out = Path(case["out"])
        save_file(untouched, out.with_suffix(".untouched.safetensors"))
        save_file(after_one, out.with_suffix(".first.safetensors"))
        save_file(trained, out.with_suffix(".trained.safetensors"))
        out.write_text(json.dumps(found))


def logprobs(policy: Any, config: RunConfig) -> list[float]:
    """Of the trained tokens of batch 0, in their packed order (single rank only; else [])."""
    import torch.distributed as dist

    from tests.support.trainer_programs.batches import make_batch
    from trainer.batch.packing import pack_for_rank

    if dist.get_world_size() > 1:
        return []
    packed = pack_for_rank(make_batch(0), config).micro_batches
    found = policy.run(
        packed, lambda logprobs_N, _entropy, _batch: (logprobs_N.sum(), logprobs_N.tolist()), train=False
    )
    return [value for part in found for value in part]


if __name__ == "__main__":
    run_cases(run)
