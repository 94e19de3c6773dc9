"""Upkeep of run folders: write the report again, and delete what is no longer needed.

    Run --rewrite_report--> summary.json, report.md, plots   (with the groups' account, if the server can be asked)
    Runs, Wanted --choose--> Removal, ... --carry_out-->     folders, checkpoints or keys of a shared server are gone

Nothing is ever deleted of a run that is live: `choose` leaves it out, and `carry_out` locks the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from async_grpo.app.launch.run_folder import find_run, remove_run
from async_grpo.app.report.run_report import write_report
from async_grpo.app.runs.run import Run, RunStatus
from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import BufferFault, ConfigError
from async_grpo.telemetry.rows import Facts
from async_grpo.telemetry.timeline import merge_timelines
from buffer import attach, connect_board, run_exists, wipe_run

DAY_S = 86400.0
_OF_THE_SERVER = ("groups", "balanced", "generated_tokens", "generated_tokens_per_s", "reward_failures")
"""Keys of the summary that only the run's server knows."""


async def rewrite_report(run: Run) -> Path:
    """Write summary.json, report.md with its plots and timeline.json from the run's files; returns report.md.

    Counts that only the run's server has come from there while it is up, and else from the summary that is there. The
    run may be live, killed or run in containers. Raises ConfigError if this release refuses its configuration.
    """
    counted = await _ask_server(run)
    known = run.written_summary()
    summary = run.computed_summary(*counted) if counted else run.computed_summary()
    if not counted and known.get("steps") == summary.get("steps"):
        summary |= {key: known[key] for key in _OF_THE_SERVER if known.get(key) is not None}
    merge_timelines(run.path)
    return write_report(run.path, summary)


async def _ask_server(run: Run) -> tuple[Facts, dict[str, int]] | None:
    """The fields of the buffer's stats and the counters of the board; None if the run's server is gone."""
    try:
        config = find_run(None, [], run.path)
        if not await run_exists(config.redis, config.name):
            return None
        buffer, board = attach(config.redis, config.name), await connect_board(config.redis, config.name)
        try:
            stats = await buffer.stats()
            return {**asdict(stats), "active": stats.active}, await board.counters()
        finally:
            await board.aclose()
            await buffer.aclose()
    except (ConfigError, BufferFault):
        return None


class Part(StrEnum):
    """Part of a run that `clean` can delete."""

    FOLDER = "folder"
    """The whole folder, and the run's keys on a shared server."""
    CHECKPOINTS = "checkpoints"
    """The resumable checkpoints of a finished run; exports for Hugging Face stay."""
    KEYS = "keys"
    """The keys of a finished run on a shared server. It can then not be extended."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which runs to clean, and which part of each. A run must meet every condition that is given."""

    part: Part = Part.FOLDER
    older_than_days: float | None = None
    keep_last: int = 0
    """Number of latest runs to keep."""
    failed: bool = False
    """Only runs that failed or were interrupted."""


@dataclass(frozen=True, slots=True)
class Removal:
    """A part of a run that will be deleted."""

    run: Run
    part: Part
    paths: tuple[Path, ...]
    size_bytes: int
    redis: RedisConfig | None
    """The shared server that holds keys of the run; None for an embedded one."""


def choose(runs: Sequence[Run], wanted: Wanted, now_s: float) -> list[Removal]:
    """Parts of `runs` to delete, in the order of `list_runs`, at the time `now_s` of the files' clock."""
    return [removal for run in runs[wanted.keep_last :] if (removal := _removal(run, wanted, now_s)) is not None]


def _removal(run: Run, wanted: Wanted, now_s: float) -> Removal | None:
    status, part = run.status(), wanted.part
    ended_badly = status in (RunStatus.FAILED, RunStatus.INTERRUPTED)
    if status is RunStatus.LIVE or (wanted.failed and not ended_badly):
        return None
    if part is not Part.FOLDER and status is not RunStatus.FINISHED:
        return None
    if wanted.older_than_days is not None and now_s - run.written_s < wanted.older_than_days * DAY_S:
        return None
    paths = _paths(run, part)
    redis = _shared_server(run) if part is not Part.CHECKPOINTS else None
    size_bytes = sum(file.lstat().st_size for path in paths for file in [path, *path.rglob("*")])
    return Removal(run, part, paths, size_bytes, redis) if paths or redis else None


def _paths(run: Run, part: Part) -> tuple[Path, ...]:
    if part is Part.CHECKPOINTS:
        return tuple(path for path in sorted((run.path / "checkpoints").glob("*")) if path.name.isdecimal())
    return (run.path,) if part is Part.FOLDER else ()


def _shared_server(run: Run) -> RedisConfig | None:
    """The shared server that holds keys of the run. Of a configuration that this release refuses, only the address is
    used."""
    settings = run.settings().get("redis") or {}
    if not settings.get("url"):
        return None
    try:
        return run.config.redis
    except ConfigError:
        return RedisConfig(url=settings["url"], tls_ca=settings.get("tls_ca"))


async def carry_out(removal: Removal) -> int:
    """Delete it; returns the number of keys that were deleted on a shared server.

    Raises ConfigError if a process is at work in the run or on the server under its name, and ServerLost if the server
    cannot be reached; nothing of the run is deleted then.
    """
    run = removal.run
    if run.folder.has_live_process():
        raise ConfigError(f"{run.path} has become live. Stop it first; nothing of it is deleted")
    keys = 0
    if removal.redis is not None and await run_exists(removal.redis, run.name):
        await _check_ours(run, removal.redis)
        keys = await wipe_run(removal.redis, run.name)
    if removal.part is Part.FOLDER:
        remove_run(run.folder)
    elif removal.paths:
        with run.folder.locked():
            for path in removal.paths:
                shutil.rmtree(path)
    return keys


async def _check_ours(run: Run, redis: RedisConfig) -> None:
    board = await connect_board(redis, run.name)
    try:
        origin, servers = await board.origin(), [beat.name for beat in await board.live_servers()]
    finally:
        await board.aclose()
    if servers or not run.folder.owns(origin):
        held = f"its rollout servers {', '.join(servers)} are at work" if servers else f"it was begun in {origin}"
        raise ConfigError(
            f"the run {run.name} on {redis.url} is not that of {run.path} alone: {held}. Nothing is deleted"
        )
