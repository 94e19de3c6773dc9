"""The policy that `async-grpo eval` and `chat` ask: a checkpoint of a run, any other checkpoint, or the live run.

    CONFIG (+ overrides) or run folder --> chosen run
    chosen run, --checkpoint PATH      --> Checkpoint --engine--+
                                                                +--open_policy--> Sampler, tokenizer
    chosen run, --live                 --> LiveRun ----HTTP-----+

`open_context` adds what an evaluation needs beside a sampler: prompts, workflow and reward pool of the configuration.
None of this changes a run. Another process exports a resumable (Megatron) checkpoint into a temporary folder, because
Megatron-core needs a process of its own. Everything is closed in reverse order, even if a later part fails to open.
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
from async_grpo.app.launch.inputs import pin
from async_grpo.app.launch.run_folder import RunFolder, changed_keys, find_run, named_folder, run_name
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
"""Longest time for an export; enough for the largest checkpoint on a slow disk."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights on disk."""

    path: Path
    version: int | None
    """Policy version; None if the folder does not say."""
    resumable: bool = False
    """Whether it is a Megatron checkpoint, which is exported first."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run in progress."""

    config: RunConfig
    servers: dict[str, int]
    """Address of every rollout server that answers over HTTP -> its policy version."""


def chosen_run(path: Path | None, overrides: Sequence[str], run_dir: Path | None) -> tuple[RunConfig, RunFolder]:
    """The configuration of the run and its folder, which may be absent.

    Raises ConfigError if no run or two runs are named, or if `run_dir` is not the folder of a run.
    """
    if (folder := named_folder(path, overrides, run_dir)) is not None:
        if not folder.config_file.is_file():
            raise ConfigError(f"{folder.path} is not the folder of a run (it has no {folder.config_file.name})")
        return folder.read_config().model_copy(update={"name": folder.path.absolute().name}), folder
    if path is None:
        raise ConfigError("which run? Give its folder, such as runs/NAME, or the CONFIG (and -o) it was started with")
    config = load(path, overrides)
    config = pin(config.model_copy(update={"name": run_name(config.name, overrides)}), planning=True)
    return config, RunFolder(config.run_dir)


def differences(config: RunConfig, folder: RunFolder) -> list[str]:
    """Keys whose values differ from those that the run was started with; [] if there is no such run."""
    if not folder.config_file.is_file():
        return []
    made_with = folder.read_config().model_dump(mode="json")
    return [key for key in changed_keys(made_with, config.model_dump(mode="json")) if key != "steps"]


def find_checkpoint(folder: RunFolder, given: Path | None) -> Checkpoint:
    """The checkpoint `given`, or the run's final one. Raises ConfigError that lists the checkpoints of the run."""
    if given is None:
        final = folder.path / "checkpoints" / "hf"
        if not final.is_dir():
            raise ConfigError(
                f"there is no checkpoint {final}: it is written when the run ends. {_what_there_is(folder)}"
            )
        return Checkpoint(check_model(final), folder.read_state().finished_steps or None)
    if not given.is_dir():
        raise ConfigError(f"--checkpoint: there is no folder {given}. {_what_there_is(folder)}")
    given = given.resolve()  # its name and the run around it tell the version
    if (given / "config.json").is_file() and any(given.glob("*.safetensors")):
        return Checkpoint(check_model(given), _version_of(given))
    if given.name.isdecimal() and RunFolder(given.parent.parent).config_file.is_file():
        return Checkpoint(given, int(given.name), resumable=True)
    raise ConfigError(
        f"--checkpoint: {given} is neither a Hugging Face folder (config.json, *.safetensors, tokenizer) nor a "
        "resumable checkpoint of a run. Make a Hugging Face folder: `async-grpo export runs/NAME OUT` for a run, "
        f"`async-grpo convert {given} OUT` for a checkpoint that convert wrote"
    )


@asynccontextmanager
async def open_checkpoint(checkpoint: Checkpoint, say: Callable[[str], None]) -> AsyncIterator[Path]:
    """The checkpoint as a Hugging Face folder, for the length of the block. Raises RoleFailed if the export fails,
    WaitTimeout if it takes too long."""
    if not checkpoint.resumable:
        yield checkpoint.path
        return
    with tempfile.TemporaryDirectory(prefix="async-grpo-export-") as folder:
        say(f"exporting {checkpoint.path} into a temporary folder")
        target = Path(folder) / "hf"
        await _export(checkpoint, target)
        yield target


async def find_live(path: Path | None, overrides: Sequence[str], run_dir: Path | None) -> LiveRun:
    """The rollout servers of a run in progress. Raises ConfigError if none of them answers over HTTP, ServerLost if the
    server of the buffer cannot be reached."""
    config = find_run(path, overrides, run_dir)
    board = await connect_board(config.redis, config.name)
    try:
        beats = await board.servers()
    finally:
        await board.aclose()
    if not beats:
        raise ConfigError(
            f"no rollout server of the run {config.name} has reported: it has ended, or they are still starting. "
            "Wait for them, or name a checkpoint (--checkpoint)"
        )
    servers = {beat.http: beat.version for beat in beats if beat.http}
    if not servers:
        raise ConfigError(
            f"the rollout servers of {config.name} ({', '.join(beat.name for beat in beats)}) do not answer over HTTP: "
            "rollout.http.port is off. Start the run with -o rollout.http.port=0, or name a checkpoint (--checkpoint)"
        )
    return LiveRun(config, servers)


@asynccontextmanager
async def open_policy(
    config: RunConfig, policy: Checkpoint | LiveRun, name: str, patience_s: float, say: Callable[[str], None]
) -> AsyncIterator[tuple[Sampler, Path]]:
    """A sampler of the policy, and a folder with its tokenizer. `patience_s` limits one completion of a live run.

    Raises ConfigError, EngineError, DependencyError, RoleFailed, WaitTimeout.
    """
    if isinstance(policy, LiveRun):
        model = await prepare_model(policy.config, say)
        sampler = HttpSampler(
            list(policy.servers),
            at_once=policy.config.rollout.http.max_concurrency,
            patience_s=patience_s,
            key=os.environ.get(KEY_VARIABLE, ""),
        )
        try:
            yield sampler, model
        finally:
            await sampler.aclose()
        return

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # warnings are for people who tune a server
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of vLLM's processes
    async with open_checkpoint(policy, say) as folder:
        say(f"loading {folder} into vLLM")
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
        fix = f"Export it yourself, `async-grpo export {run_dir} OUT`, and name OUT with --checkpoint"
        raise WaitTimeout(f"{checkpoint.path} to be exported", EXPORT_TIMEOUT_S, fix) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        tail = " ".join(printed.decode("utf-8", "replace").strip().splitlines()[-_SHOWN_LINES:])
        raise RoleFailed(f"exporting {checkpoint.path} ended with exit code {process.returncode}: {tail}")


def _version_of(folder: Path) -> int | None:
    number = folder.name.removeprefix("hf-")
    if number != folder.name and number.isdecimal():
        return int(number)
    if folder.name == "hf" and folder.parent.name == "checkpoints":
        return RunFolder(folder.parent.parent).read_state().finished_steps or None
    return None


def _what_there_is(folder: RunFolder) -> str:
    """The checkpoints of a run, for the error that says none was found."""
    checkpoints = folder.path / "checkpoints"
    found = sorted(path for path in checkpoints.glob("*") if path.name.isdecimal() or path.name.startswith("hf"))
    if not found:
        return (
            f"{folder.path} has no checkpoint at all. Is the name right (overrides, -o, are part of it)? While the run "
            "is in progress, ask its servers: --live"
        )
    names = ", ".join(path.name for path in found)
    return f"There are {names}: give one with --checkpoint {checkpoints}/{found[-1].name}, or ask the live run: --live"


@asynccontextmanager
async def open_context(
    config: RunConfig, sampler: Sampler, tokenizer: Tokenizer, name: str, *, kept: int
) -> AsyncIterator[EvalContext]:
    """A sampler with the held-out prompts, workflow and rewards of the configuration; the run kept the first `kept`
    prompts from training. Raises ConfigError or DataError if a part cannot be made."""
    source = make_source(config, tokenizer, kept=kept)
    async with RewardPool(config.rewards) as pool:
        yield EvalContext(config, name, sampler, pool, make_workflow(config.rollout, tokenizer), source)
