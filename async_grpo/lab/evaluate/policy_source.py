"""The policy of `async-grpo eval` and `chat`: a checkpoint of a run, any other checkpoint, or a live run.

    CONFIG (+ overrides) or run folder --> chosen run
    chosen run, --checkpoint PATH      --> Checkpoint --engine--+
                                                                +--open_policy--> Sampler, tokenizer
    chosen run, --live                 --> LiveRun ----HTTP-----+

`open_eval_context` adds the prompts, the workflow and the reward pool of the configuration. The run is never changed. A
resumable (Megatron) checkpoint is exported into a temporary folder by a child process: Megatron-core keeps global state
and cannot be unloaded. Everything is closed in reverse order, even if a later part fails to open.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from async_grpo.app.launch.first_policy import check_model, prepare_model
from async_grpo.app.launch.inputs import pin_inputs
from async_grpo.app.launch.run_folder import RunFolder, changed_keys, find_named_folder, find_run, run_name
from async_grpo.config import RunConfig, load
from async_grpo.data import make_source
from async_grpo.data.tokenizer import Tokenizer
from async_grpo.errors import ConfigError, RoleFailed, WaitTimeout
from async_grpo.rewards.pool import RewardPool
from async_grpo.utils.child_process import child_argv
from buffer import connect_board
from rollout_server.context import EvalContext
from rollout_server.engines import make_engine
from rollout_server.engines.base import Sampler
from rollout_server.engines.http import KEY_VARIABLE, HttpSampler
from rollout_server.workflows import make_workflow

_SHOWN_LINES = 3
EXPORT_TIMEOUT_S = 3600.0
"""Enough for the largest checkpoint on a slow disk."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights on disk."""

    path: Path
    version: int | None
    """Policy version; None if unknown."""
    resumable: bool = False
    """True for a Megatron checkpoint, which has to be exported first."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run in progress."""

    config: RunConfig
    servers: dict[str, int]
    """HTTP address of each rollout server that has one -> its policy version."""


def load_chosen_run(path: Path | None, overrides: Sequence[str], run_dir: Path | None) -> tuple[RunConfig, RunFolder]:
    """Return the configuration of the run and its folder, which may not exist.

    Raises ConfigError if no run or two runs are named, or if `run_dir` is not the folder of a run.
    """
    folder = find_named_folder(path, overrides, run_dir)
    if folder is not None:
        if not folder.config_file.is_file():
            raise ConfigError(f"{folder.path} is not the folder of a run (it has no {folder.config_file.name})")
        return folder.read_config().model_copy(update={"name": folder.path.absolute().name}), folder
    if path is None:
        raise ConfigError("which run? Give its folder, such as runs/NAME, or the CONFIG (and -o) it was started with")
    config = load(path, overrides)
    config = pin_inputs(config.model_copy(update={"name": run_name(config.name, overrides)}), planning=True)
    return config, RunFolder(config.run_dir)


def differences(config: RunConfig, folder: RunFolder) -> list[str]:
    """Return the keys whose values differ from those the run was started with; empty if the run has no folder."""
    if not folder.config_file.is_file():
        return []
    started_with = folder.read_config().model_dump(mode="json")
    return [key for key in changed_keys(started_with, config.model_dump(mode="json")) if key != "steps"]


def find_policy_checkpoint(folder: RunFolder, path: Path | None) -> Checkpoint:
    """Return the checkpoint at `path`, or the run's final one. Raises ConfigError, with a list of the run's
    checkpoints, if there is none."""
    if path is None:
        final = folder.path / "checkpoints" / "hf"
        if not final.is_dir():
            raise ConfigError(
                f"there is no checkpoint {final}: it is written when the run ends. {_checkpoints_hint(folder)}"
            )
        return Checkpoint(check_model(final), folder.read_state().finished_steps or None)
    if not path.is_dir():
        raise ConfigError(f"--checkpoint: there is no folder {path}. {_checkpoints_hint(folder)}")

    # Resolve first: the version comes from the folder's real name and the run around it, and the path may be relative
    # or a link.
    path = path.resolve()
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return Checkpoint(check_model(path), _version_of_export(path))
    if path.name.isdecimal() and RunFolder(path.parent.parent).config_file.is_file():
        return Checkpoint(path, int(path.name), resumable=True)
    raise ConfigError(
        f"--checkpoint: {path} is neither a Hugging Face folder (config.json, *.safetensors, tokenizer) nor a "
        "resumable checkpoint of a run. Make a Hugging Face folder: `async-grpo export runs/NAME OUT` for a run, "
        f"`async-grpo convert {path} OUT` for a checkpoint written by convert"
    )


@asynccontextmanager
async def open_checkpoint(checkpoint: Checkpoint, report_progress: Callable[[str], None]) -> AsyncIterator[Path]:
    """Provide the checkpoint as a Hugging Face folder until the block ends. Raises RoleFailed if the export fails,
    WaitTimeout if it takes longer than EXPORT_TIMEOUT_S."""
    if not checkpoint.resumable:
        yield checkpoint.path
        return
    with tempfile.TemporaryDirectory(prefix="async-grpo-export-") as folder:
        report_progress(f"exporting {checkpoint.path} into a temporary folder")
        target = Path(folder) / "hf"
        await _export(checkpoint, target)
        yield target


async def find_live_run(path: Path | None, overrides: Sequence[str], run_dir: Path | None) -> LiveRun:
    """Find the rollout servers of a run in progress. Raises ConfigError if none of them serves HTTP, ServerLost if the
    buffer's server cannot be reached."""
    config = find_run(path, overrides, run_dir)
    board = await connect_board(config.redis, config.name)
    try:
        beats = await board.live_servers()
    finally:
        await board.aclose()
    if not beats:
        raise ConfigError(
            f"no rollout server of the run {config.name} has reported: the run has ended, or its servers are still "
            "starting. Wait for them, or use a checkpoint (--checkpoint)"
        )
    servers = {beat.http: beat.version for beat in beats if beat.http}
    if not servers:
        raise ConfigError(
            f"the rollout servers of {config.name} ({', '.join(beat.name for beat in beats)}) do not serve HTTP: "
            "rollout.http.port is off. Start the run with -o rollout.http.port=0, or use a checkpoint (--checkpoint)"
        )
    return LiveRun(config, servers)


@asynccontextmanager
async def open_policy(
    config: RunConfig,
    policy: Checkpoint | LiveRun,
    name: str,
    patience_s: float,
    report_progress: Callable[[str], None],
) -> AsyncIterator[tuple[Sampler, Path]]:
    """Provide a sampler of the policy, and a folder with its tokenizer. `patience_s` limits each completion of a live
    run.

    Raises ConfigError, EngineError, DependencyError, RoleFailed, WaitTimeout.
    """
    if isinstance(policy, LiveRun):
        model = await prepare_model(policy.config, report_progress)
        sampler = HttpSampler(
            list(policy.servers),
            max_concurrency=policy.config.rollout.http.max_concurrency,
            timeout_s=patience_s,
            key=os.environ.get(KEY_VARIABLE, ""),
        )
        try:
            yield sampler, model
        finally:
            await sampler.aclose()
        return

    # vLLM's warnings are about tuning a server, and would drown the output of this command.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    async with open_checkpoint(policy, report_progress) as folder:
        report_progress(f"loading {folder} into vLLM")
        engine = make_engine(config, folder, name=name)
        try:
            await engine.start()
            yield engine, folder
        finally:
            await engine.aclose()


async def _export(checkpoint: Checkpoint, target: Path) -> None:
    run_dir = checkpoint.path.parent.parent
    argv = [sys.executable, "-m", "async_grpo.app.cli.main", "export", str(run_dir), str(target)]
    process = await asyncio.create_subprocess_exec(
        *child_argv([*argv, "--version", str(checkpoint.version), "--merged"]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(EXPORT_TIMEOUT_S):
            printed, _ = await process.communicate()
    except TimeoutError:
        fix = f"Export it yourself with `async-grpo export {run_dir} OUT`, and pass --checkpoint OUT"
        raise WaitTimeout(f"the export of {checkpoint.path}", EXPORT_TIMEOUT_S, fix) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        tail = " ".join(printed.decode("utf-8", "replace").strip().splitlines()[-_SHOWN_LINES:])
        raise RoleFailed(f"exporting {checkpoint.path} ended with exit code {process.returncode}: {tail}")


def _version_of_export(folder: Path) -> int | None:
    number = folder.name.removeprefix("hf-")
    if number != folder.name and number.isdecimal():
        return int(number)
    if folder.name == "hf" and folder.parent.name == "checkpoints":
        return RunFolder(folder.parent.parent).read_state().finished_steps or None
    return None


def _checkpoints_hint(folder: RunFolder) -> str:
    """The run's checkpoints and how to choose one, for errors about a missing checkpoint."""
    checkpoints = folder.path / "checkpoints"
    names = sorted(path.name for path in checkpoints.glob("*") if path.name.isdecimal() or path.name.startswith("hf"))
    if not names:
        return (
            f"{folder.path} has no checkpoint. Overrides (-o) are part of a run's name. While it is in "
            "progress, use its servers: --live"
        )
    return (
        f"There are {', '.join(names)}: choose one with --checkpoint {checkpoints}/{names[-1]}, or use the live run: "
        "--live"
    )


@asynccontextmanager
async def open_eval_context(
    config: RunConfig, sampler: Sampler, tokenizer: Tokenizer, name: str, *, kept: int
) -> AsyncIterator[EvalContext]:
    """Combine a sampler with the held-out prompts, workflow and rewards of the configuration. The first `kept` prompts
    were not trained on. Raises ConfigError or DataError."""
    source = make_source(config, tokenizer, held_out_by_run=kept)
    async with RewardPool(config.rewards) as pool:
        yield EvalContext(config, name, sampler, pool, make_workflow(config.rollout, tokenizer), source)
