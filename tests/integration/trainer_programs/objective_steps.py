"""One step from the same weights and the same batch, for one objective after another.

    python -m trainer_programs.objective_steps CASES.json      (under torchrun for several ranks)

A case: {"config": FILE, "model": FOLDER, "out": FILE}. `out` gets the figures of the step as JSON; how far each weight
moved lies beside it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from async_grpo.config import RunConfig, load
from trainer.platform import Platform, select_platform


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
        run(config, Path(case["model"]), Path(case["out"]), platform)
    stop_ranks()


def run(config: RunConfig, model: Path, out: Path, platform: Platform) -> None:
    from safetensors.torch import save_file

    from trainer.parallel import is_leader
    from trainer.phases import Phases
    from trainer.start import load_policy
    from trainer.step import train_step
    from trainer_programs.aged_batch import make_aged_batch

    policy = load_policy(config, model, platform)
    before = {name: tensor.clone() for name, tensor in policy.export()}
    result = train_step(policy, make_aged_batch(), config, lr=config.trainer.optimizer.lr, phases=Phases())
    moved = {name: tensor - before[name] for name, tensor in policy.export()}
    if is_leader():
        save_file(moved, out.with_suffix(".safetensors"))
        out.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
