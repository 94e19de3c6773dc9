"""Upkeep of run folders: write the report again, and delete parts that are no longer needed.

    Run --rewrite_report--> summary.json, report.md, plots   (with the accounting of groups, if the server is reachable)
    Runs, Wanted --choose_removals--> Removals --delete_part--> folders, checkpoints or keys on a shared server

Parts of a live run are never deleted: `choose_removals` skips it, and `delete_part` locks the run.
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
_SERVER_KEYS = ("groups", "balanced", "generated_tokens", "generated_tokens_per_s", "reward_failures")
"""Keys of the summary that come from the run's server only."""


async def rewrite_report(run: Run) -> Path:
    """Write summary.json, report.md with its plots and timeline.json from the run's files. Returns report.md.

    Counts that only the run's server has are read from it, or from the existing summary if it is down. The run may be
    live, killed or in containers. Raises ConfigError if this release rejects its configuration.
    """
    counts = await _read_server_counts(run)
    written = run.written_summary()
    if counts is not None:
        stats, counters = counts
        summary = run.computed_summary(stats, counters)
    else:
        summary = run.computed_summary()
        # The counts of an existing summary are valid only if no step was trained since.
        if written.get("steps") == summary.get("steps"):
            summary |= {key: written[key] for key in _SERVER_KEYS if written.get(key) is not None}
    merge_timelines(run.path)
    return write_report(run.path, summary)


async def _read_server_counts(run: Run) -> tuple[Facts, dict[str, int]] | None:
    """Return the fields of the buffer's stats and the counters of the board; None if the run's server is gone."""
    try:
        config = find_run(None, [], run.path)
        if not await run_exists(config.redis, config.name):
            return None
        buffer = attach(config.redis, config.name)
        board = await connect_board(config.redis, config.name)
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
    """The folder, and the run's keys on a shared server."""
    CHECKPOINTS = "checkpoints"
    """The resumable checkpoints of a finished run; exports for Hugging Face stay."""
    KEYS = "keys"
    """The keys of a finished run on a shared server. The run can then not be extended."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Runs to clean, and the part to delete. A run must meet all conditions that are set."""

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


def choose_removals(runs: Sequence[Run], wanted: Wanted, now_s: float) -> list[Removal]:
    """Return the parts of `runs` to delete. `runs` are in the order of `list_runs`; `now_s` is in seconds since the
    epoch."""
    removals = []
    for run in runs[wanted.keep_last :]:
        removal = _plan_removal(run, wanted, now_s)
        if removal is not None:
            removals.append(removal)
    return removals


def _plan_removal(run: Run, wanted: Wanted, now_s: float) -> Removal | None:
    status = run.status()
    part = wanted.part
    if status is RunStatus.LIVE:
        return None
    if wanted.failed and status not in (RunStatus.FAILED, RunStatus.INTERRUPTED):
        return None
    if part is not Part.FOLDER and status is not RunStatus.FINISHED:
        return None
    if wanted.older_than_days is not None and now_s - run.written_s < wanted.older_than_days * DAY_S:
        return None
    paths = _paths(run, part)
    redis = _shared_server(run) if part is not Part.CHECKPOINTS else None
    size_bytes = sum(file.lstat().st_size for path in paths for file in [path, *path.rglob("*")])
    if not paths and redis is None:
        return None
    return Removal(run, part, paths, size_bytes, redis)


def _paths(run: Run, part: Part) -> tuple[Path, ...]:
    if part is Part.CHECKPOINTS:
        return tuple(path for path in sorted((run.path / "checkpoints").glob("*")) if path.name.isdecimal())
    if part is Part.FOLDER:
        return (run.path,)
    return ()


def _shared_server(run: Run) -> RedisConfig | None:
    """Return the shared server that holds keys of the run. If this release rejects the configuration, only the address
    is used."""
    settings = run.settings().get("redis") or {}
    if not settings.get("url"):
        return None
    try:
        return run.config.redis
    except ConfigError:
        return RedisConfig(url=settings["url"], tls_ca=settings.get("tls_ca"))


async def delete_part(removal: Removal) -> int:
    """Delete a part of a run. Returns the number of keys that were deleted on a shared server.

    Raises ConfigError if a process uses the run's folder, or if the keys on the server belong to another run or have
    live servers; ServerLost if the server is unreachable. Nothing is deleted then.
    """
    run = removal.run
    if run.folder.has_live_process():
        raise ConfigError(f"{run.path} has become live, so nothing was deleted. Stop it first")

    # The keys come before the folder, because only the folder's id shows that the keys belong to this run.
    keys = 0
    if removal.redis is not None and await run_exists(removal.redis, run.name):
        await _check_ownership(run, removal.redis)
        keys = await wipe_run(removal.redis, run.name)
    if removal.part is Part.FOLDER:
        remove_run(run.folder)
    elif removal.paths:
        with run.folder.locked():
            for path in removal.paths:
                shutil.rmtree(path)
    return keys


async def _check_ownership(run: Run, redis: RedisConfig) -> None:
    """Raise ConfigError if the run on the server has live servers or belongs to another folder."""
    board = await connect_board(redis, run.name)
    try:
        origin = await board.origin()
        servers = [beat.name for beat in await board.live_servers()]
    finally:
        await board.aclose()
    if servers or not run.folder.owns(origin):
        reason = f"its rollout servers {', '.join(servers)} are live" if servers else f"it was started in {origin}"
        raise ConfigError(
            f"the run {run.name} on {redis.url} does not belong to {run.path} alone: {reason}. Nothing was deleted"
        )
