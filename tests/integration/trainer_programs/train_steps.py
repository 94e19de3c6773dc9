"""Train a few steps, in one case after another, and write down what can be compared.

    python -m trainer_programs.train_steps CASES.json      (under torchrun for several ranks)

A case: {"config": FILE, "model": FOLDER, "out": FILE, "save_at": V | null, "resume": bool,
"poisoned": bool}. `out` gets losses, gradient norms, log-probabilities and the error that ended the
steps, if any, as JSON; the weights lie beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig, load
from async_grpo.errors import TrainingError
from trainer.platform import Platform, select_platform

VERSIONS = 4


def main() -> None:
    platform = select_platform("cpu")
    platform.activate(1)
    from megatron.core import parallel_state

    from trainer.parallel import lay_out, start_ranks, stop_ranks

    cases = json.loads(Path(sys.argv[1]).read_text())
    configs = [load(Path(case["config"])) for case in cases]
    start_ranks(configs[0].trainer, platform, configs[0].seed, 60.0)
    for config, case in zip(configs, cases, strict=True):
        parallel_state.destroy_model_parallel()
        lay_out(config.trainer, config.seed)
        run(config, case, platform)
    stop_ranks()


def run(config: RunConfig, case: dict[str, Any], platform: Platform) -> None:
    from safetensors.torch import save_file

    from trainer.checkpoint import CheckpointFolder
    from trainer.parallel import is_leader
    from trainer.phases import Phases
    from trainer.start import load_policy
    from trainer.step import train_step
    from trainer_programs.batches import make_batch

    policy = load_policy(config, Path(case["model"]), platform)
    untouched = {name: tensor.clone() for name, tensor in policy.export()}
    checkpoints = CheckpointFolder(config.run_dir / "checkpoints", keep=2)
    first = 0
    if case["resume"]:
        newest = checkpoints.newest()
        assert newest is not None
        checkpoints.load(policy, newest)
        first = newest
    found: dict[str, Any] = {"first": first, "logprobs": logprobs(policy, config), "steps": []}
    for version in range(first, VERSIONS):
        batch = make_batch(version, poisoned=case["poisoned"])
        try:
            result = train_step(policy, batch, config, lr=config.trainer.optimizer.lr, phases=Phases())
        except TrainingError as error:
            found["refused"] = str(error)
            break
        found["steps"].append({"loss": result.loss, "grad_norm": result.grad_norm, "tokens": result.trained_tokens})
        if version + 1 == case["save_at"]:
            checkpoints.save(policy, version + 1, epoch=1)
    trained = {name: tensor.clone() for name, tensor in policy.export()}
    if is_leader():
        out = Path(case["out"])
        save_file(untouched, out.with_suffix(".untouched.safetensors"))
        save_file(trained, out.with_suffix(".trained.safetensors"))
        out.write_text(json.dumps(found))


def logprobs(policy: Any, config: RunConfig) -> list[float]:
    """Of the trained tokens of batch 0, in their packed order (single rank only; else [])."""
    import torch.distributed as dist

    from trainer.step import pack_for_rank
    from trainer_programs.batches import make_batch

    if dist.get_world_size() > 1:
        return []
    packed = pack_for_rank(make_batch(0), config).micro_batches
    found = policy.run(
        packed, lambda logprobs_N, _entropy, _batch: (logprobs_N.sum(), logprobs_N.tolist()), train=False
    )
    return [value for part in found for value in part]


if __name__ == "__main__":
    main()
