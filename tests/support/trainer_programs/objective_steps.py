"""One step from the same weights and the same batch, for one objective after another.

    python -m tests.support.trainer_programs.objective_steps CASES.json

A case: {"config": FILE, "model": FOLDER, "out": FILE}. `out` gets the figures of the step as JSON; how far each weight
moved lies beside it.
"""

from __future__ import annotations

import json
from pathlib import Path

from async_grpo.config import RunConfig
from tests.support.trainer_programs.running import run_cases
from trainer.platform import Platform


def run(config: RunConfig, case: dict[str, str], platform: Platform) -> None:
    from safetensors.torch import save_file

    from async_grpo.telemetry.timeline import PhaseTimer
    from tests.support.trainer_programs.aged_batch import make_aged_batch
    from trainer.distributed import is_leader
    from trainer.model.policy import load_policy
    from trainer.step.step import train_step

    policy, out = load_policy(config, Path(case["model"]), platform), Path(case["out"])
    before = {name: tensor.clone() for name, tensor in policy.export()}
    result = train_step(policy, make_aged_batch(), config, lr=config.trainer.optimizer.lr, phases=PhaseTimer())
    moved = {name: tensor - before[name] for name, tensor in policy.export()}
    if is_leader():
        save_file(moved, out.with_suffix(".safetensors"))
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    run_cases(run)
