"""One rank of the trainer.

    python -m trainer.main --config runs/NAME/config.yaml --model FOLDER

Started by `trainer.node_main`, or by a launcher that places the ranks (`async_grpo.app.launch.single_role`). RANK,
WORLD_SIZE and the address of the store come from the environment; without them this is the only rank.

Exit code 0: the run is trained to its end, or a checkpoint was written after SIGTERM. 78: the configuration, the data
or the installation is wrong, and a restart would fail again.
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
    # Import late: the platform must be active before anything imports megatron.
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
    # An earlier trainer that was killed may have left its copies of the weights in /dev/shm. Remove them before the
    # ranks meet: after that, rank 0 creates the store of this trainer.
    remove_trainer_files(config.name_with_digest)

    # The other ranks wait for rank 0 in collective calls, so their timeout covers the longest wait of rank 0.
    longest_wait_s = max(
        trainer.take_timeout_s, config.eval.timeout_s, trainer.checkpoint.timeout_s, turn_timeout_s(config)
    )
    start_ranks(trainer, platform, config.seed, longest_wait_s, Claim.of(config, model))
    logger = TrainerLogger(config)
    devices = SharedDevices(config, platform.release_memory)

    # Engines must sleep already here: an optimizer that is offloaded later is created on the device.
    with devices.engines_asleep():
        policy = load_policy(config, model, platform)
        experts = {"experts": platform.experts} if policy.model.config.num_moe_experts else {}
        logger.info("model built", attention=platform.attention, **experts)
        reference = load_reference(config, policy, model, platform)
        store = RunStore.open(config.runs_store, config.name) if config.runs_store else None
        checkpoints = CheckpointFolder(
            config.run_dir / "checkpoints", trainer.checkpoint, reference, store, logger.warn
        )
        version, damage = checkpoints.load_newest(policy)

    # Megatron runs the garbage collector at every checkpoint. Nothing created up to here is garbage, so exclude it.
    gc.freeze()
    coordinator = Coordinator(config, devices)
    peak_flops = platform.peak_flops(config.model.precision)
    if peak_flops is not None:
        peak_flops *= config.trainer.processes
    run = TrainerRun(
        config,
        model,
        policy,
        coordinator,
        checkpoints,
        logger,
        version,
        damage,
        reference=reference,
        peak_flops=peak_flops,
    )
    train(run)
    coordinator.close()
    logger.close()
    stop_ranks()


if __name__ == "__main__":
    main()
