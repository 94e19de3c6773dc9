"""`--fresh` and the copy of a run in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.app.launch.run_copy import fetch_run, remove_copy
from async_grpo.app.launch.run_folder import RunFolder, open_run, write_config
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError
from trainer.checkpoint.store import RunStore


def config_on(machine: Path, bucket: Path) -> RunConfig:
    """The configuration of the run `mine` on a machine with its own folder of runs."""
    raw = {"name": "mine", "runs_dir": str(machine / "runs"), "runs_store": f"file://{bucket}", "model": {"random": {}}}
    return validate(raw, "test")


def store_of(config: RunConfig) -> RunStore:
    assert config.runs_store is not None
    return RunStore.open(config.runs_store, config.name)


def begin(config: RunConfig) -> RunFolder:
    """A run with a copy."""
    folder = open_run(config)
    write_config(folder, config, for_roles=config)
    assert folder.origin
    store_of(config).push_files(folder.path)
    return folder


class Asked:
    """Answers questions, and counts them."""

    def __init__(self, answer: bool) -> None:
        self.answer, self.questions = answer, list[str]()

    def __call__(self, question: str) -> bool:
        self.questions.append(question)
        return self.answer


async def test_fresh_leaves_the_copy_of_a_live_run_alone(tmp_path: Path) -> None:
    config = config_on(tmp_path, tmp_path / "bucket")
    folder, yes = begin(config), Asked(True)
    with folder.locked(), pytest.raises(ConfigError, match="another `async-grpo run`"):
        await remove_copy(config, yes)
    assert store_of(config).read_run_id() == folder.id_file.read_text()
    await remove_copy(config, yes)
    assert not store_of(config).has_objects() and yes.questions == [], "it is this folder's own copy"


async def test_fresh_asks_before_it_deletes_the_copy_of_another_run(tmp_path: Path) -> None:
    theirs, ours = (config_on(tmp_path / machine, tmp_path / "bucket") for machine in ("theirs", "ours"))
    folder, no = begin(theirs), Asked(False)
    with pytest.raises(ConfigError, match="not confirmed"):
        await remove_copy(ours, no)
    assert store_of(theirs).read_run_id() == folder.id_file.read_text() and len(no.questions) == 1
    await remove_copy(ours, Asked(True))
    assert not store_of(theirs).has_objects()


async def test_fresh_asks_nothing_without_a_copy(tmp_path: Path) -> None:
    no = Asked(False)
    await remove_copy(config_on(tmp_path, tmp_path / "bucket"), no)
    assert no.questions == []


async def test_fresh_deletes_no_copy_for_a_folder_that_is_no_run(tmp_path: Path) -> None:
    theirs, ours = (config_on(tmp_path / machine, tmp_path / "bucket") for machine in ("theirs", "ours"))
    begin(theirs)
    ours.run_dir.mkdir(parents=True)
    (ours.run_dir / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not a run"):
        await remove_copy(ours, Asked(True))
    assert store_of(theirs).has_objects()


def test_a_copy_that_was_deleted_elsewhere_is_made_whole_again(tmp_path: Path) -> None:
    config = config_on(tmp_path, tmp_path / "bucket")
    folder, store = begin(config), store_of(config)
    store.push_files(folder.path)
    store_of(config).remove()
    store.push_files(folder.path)
    assert store.read_run_id() == folder.id_file.read_text()
    fetch_run(config, print)  # it is known as this run's
