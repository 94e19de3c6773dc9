"""One rank of the trainer.

    python -m trainer.main --config runs/NAME/config.yaml --model FOLDER

`trainer.node_main` starts it, or a launcher that places the ranks (`async_grpo.app.launch.single_role`), with RANK,
WORLD_SIZE and the address of the store in its environment; without them it is the only rank. Exit code 0: the run is
trained to its end, or SIGTERM was obeyed and a checkpoint written. 78: the configuration, the data or the installation
is at fault, and it must not be started again.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

from async_grpo.config import RunConfig, load
from async_grpo.errors import CONFIG_FAULTS, EXIT_CONFIG
from async_grpo.telemetry.logging import bind_process, configure_logging, report_fatal
from async_grpo.telemetry.role_history import record_end
from async_grpo.utils.private_names import check_private_names
from async_grpo.utils.processes import uncollected
from async_grpo.weights.shared_memory import remove_trainer_files
from trainer.platform import Platform, select_platform


def main() -> None:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(prog="trainer.main", description="One rank of the trainer.")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration of the run")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the first policy")
    arguments = parser.parse_args()
    configure_logging("trainer")
    bind_process(replica=os.environ.get("RANK", "0"))
    try:
        config = load(arguments.config)
        platform = select_platform(config.trainer.platform)
        with uncollected():
            platform.activate(config.trainer)
        _train(config, arguments.model, platform)
        record_end()
    except CONFIG_FAULTS as error:
        report_fatal(error)
        sys.exit(EXIT_CONFIG)


def _train(config: RunConfig, model: Path, platform: Platform) -> None:
    """Imports come late: the platform must be active before anything imports megatron."""
    with uncollected():
        check_private_names("trainer", "trainer, torch")
        from async_grpo.algorithms import check_objective
        from trainer.checkpoint.folder import CheckpointFolder
        from trainer.checkpoint.store import RunStore
        from trainer.coordinator import Coordinator, SharedDevices, turn_timeout_s
        from trainer.loop import TrainerRun, train
        from trainer.model.policy import load_policy
        from trainer.model.reference import load_reference
        from trainer.ranks.agreement import Claim
        from trainer.ranks.distributed import start_ranks, stop_ranks
        from trainer.run_logger import TrainerLogger

    check_objective(config.trainer.objective)
    trainer = config.trainer
    # An earlier trainer that was killed with its node may have left its copies of the weights here. The store of this
    # one is not there yet: rank 0 makes it when all ranks have joined.
    remove_trainer_files(config.local_name)
    waits_s = (trainer.take_timeout_s, config.eval.timeout_s, trainer.checkpoint.timeout_s, turn_timeout_s(config))
    start_ranks(trainer, platform, config.seed, max(waits_s), Claim.of(config, model))
    logger = TrainerLogger(config)
    devices = SharedDevices(config, platform.release_memory)
    with devices.held():  # an optimizer that is offloaded is made on the device
        policy = load_policy(config, model, platform)
        mixture = {"experts": platform.experts} if policy.model.config.num_moe_experts else {}
        logger.note("model built", attention=platform.attention, **mixture)
        reference = load_reference(config, policy, model, platform)
        store = RunStore.open(config.runs_store, config.name) if config.runs_store else None
        folder = config.run_dir / "checkpoints"
        checkpoints = CheckpointFolder(folder, trainer.checkpoint, reference, store, logger.warn)
        version, damage = checkpoints.load_newest(policy)
    gc.freeze()  # Megatron collects garbage at every checkpoint: what is here by now need not be searched
    coordinator = Coordinator(config, devices)
    peak_flops = platform.peak_flops(config.model.precision)
    peak_flops = peak_flops * config.trainer.processes if peak_flops is not None else None
    parts = (config, model, policy, coordinator, checkpoints, logger)
    train(TrainerRun(*parts, version, damage, reference=reference, peak_flops=peak_flops))
    coordinator.close()
    logger.close()
    stop_ranks()


if __name__ == "__main__":
    main()
