"""Copy of a run in a bucket (`runs_store`): downloaded before a run starts, completed after it has ended.

bare machine --fetch_run--> run folder with its newest checkpoint --> the run resumes
report       --copy_results--> the copy                           --pull_run--> a folder for `async-grpo runs`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from async_grpo.app.launch.run_folder import RunFolder, check_is_run
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from trainer.checkpoint.store import KEY, RunStore, list_stored_runs

ReportProgress = Callable[[str], None]


def fetch_run(config: RunConfig, report_progress: ReportProgress) -> None:
    """Download the newest checkpoint and the files of the run into its folder if the copy is newer.

    Does nothing without `runs_store`. Raises ConfigError if the copy belongs to another run or is unreachable,
    CheckpointError if it is damaged.
    """
    if config.runs_store is None:
        return
    store = RunStore.open(config.runs_store, config.name)
    folder = RunFolder(config.run_dir.absolute())
    try:
        stored_id = store.read_run_id()
        if stored_id is not None and folder.id_file.exists() and stored_id != folder.id_file.read_text():
            raise ConfigError(
                f"{store.url} is the copy of another run than the one in {folder.path}. Neither was changed. "
                "Give this run another `name`, or start over with --fresh, which deletes both"
            )
        folder.path.mkdir(parents=True, exist_ok=True)
        with folder.locked():
            store.pull_run(folder.path, report_progress)
    except OSError as error:
        raise _unreachable(store.url, error) from error
    folder.origin  # noqa: B018  (creates run.id, which is copied with the other files)


async def remove_copy(config: RunConfig, confirm: Callable[[str], bool]) -> None:
    """Delete the copy of the run, for `--fresh`. Does nothing without `runs_store`.

    Takes the folder's lock first, because a live run would lose all its checkpoints. A copy with another id may be a
    colleague's run of the same name in a shared bucket, so `confirm` decides. Raises ConfigError, before anything is
    deleted, if the run is live, the folder holds no run, `confirm` refuses, or the store is unreachable.
    """
    if config.runs_store is None:
        return
    store = RunStore.open(config.runs_store, config.name)
    folder = RunFolder(config.run_dir.absolute())
    check_is_run(folder)
    try:
        with folder.locked() if folder.path.exists() else nullcontext():
            stored_id = await asyncio.to_thread(store.read_run_id)
            own_id = folder.id_file.read_text() if folder.id_file.exists() else None
            is_foreign = stored_id != own_id and await asyncio.to_thread(store.has_objects)
            conflict = f"{store.url} is the copy of another run than the one in {folder.path}"
            if is_foreign and not confirm(f"{conflict}. Delete it with all its checkpoints?"):
                raise ConfigError(
                    f"--fresh was not confirmed: {conflict}, and neither was deleted. Give this run another name "
                    "(-o name=...)"
                )
            await asyncio.to_thread(store.remove)
    except OSError as error:
        raise _unreachable(store.url, error) from error


def copy_results(config: RunConfig, folder: RunFolder, report_progress: ReportProgress) -> None:
    """Copy the files of the run to `runs_store`. A failure is only reported, because the run itself has ended."""
    if config.runs_store is None:
        return
    try:
        RunStore.open(config.runs_store, config.name).push_files(folder.path)
    except OSError as error:
        report_progress(f"the report could not be copied to {config.runs_store}: {error}")


def pull_run(url: str, runs_dir: Path, report_progress: ReportProgress, *, checkpoint: bool) -> Path:
    """Download the files of the run at `url` into a new folder in `runs_dir`; `checkpoint` adds its newest checkpoint.

    Raises ConfigError if there is no such run, or if the folder exists already.
    """
    place, _, name = url.rstrip("/").rpartition("/")
    target = runs_dir / name
    if target.exists():
        raise ConfigError(f"{target} exists already and is not overwritten. Choose another folder of runs (--to)")
    store = RunStore.open(place, name)
    try:
        names = list_stored_runs(place)
        if name not in names:
            raise ConfigError(
                f"there is no run at {url}. Runs in {place}: {', '.join(names) or 'none'}. Give PLACE/NAME"
            )
        if checkpoint:
            store.pull_run(target, report_progress)
        store.pull_files(target)
    except OSError as error:
        raise _unreachable(store.url, error) from error
    return target


def _unreachable(url: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{url} ({KEY}) cannot be used: {error}. Nothing was started. Check the bucket and the credentials in the "
        "environment; the same command continues where this one ended"
    )
