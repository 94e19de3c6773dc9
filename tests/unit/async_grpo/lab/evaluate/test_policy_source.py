"""Which policy `async-grpo eval` and `chat` ask, and what they refuse."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.app.launch.run_folder import RunFolder, RunState
from async_grpo.errors import ConfigError, WaitTimeout
from async_grpo.lab.evaluate.policy_source import (
    Checkpoint,
    LiveRun,
    differences,
    find_live_run,
    find_policy_checkpoint,
    load_chosen_run,
    open_checkpoint,
)
from async_grpo.wire.board import ServerBeat
from tests.support.rollout_fakes import config_of, leave_run_folder

CONFIG = Path(__file__).parents[5] / "configs" / "quickstart.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of a run with one resumable checkpoint, 00000010."""
    made = leave_run_folder(config_of(runs_dir=tmp_path))
    (made.path / "checkpoints" / "00000010").mkdir(parents=True)
    return made


def hugging_face(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in (("config.json", '{"model_type": "qwen2"}'), ("tokenizer_config.json", "{}")):
        (folder / name).write_text(text)
    save_file({"a": np.zeros(1)}, folder / "model.safetensors")
    return folder


def test_the_final_checkpoint_of_the_run_is_the_default(folder: RunFolder) -> None:
    path = hugging_face(folder.path / "checkpoints" / "hf")
    assert find_policy_checkpoint(folder, None) == Checkpoint(path, None)
    folder.write_state(RunState(finished_steps=4))
    assert find_policy_checkpoint(folder, None) == find_policy_checkpoint(folder, path) == Checkpoint(path, 4)


def test_a_checkpoint_says_its_version_by_its_name(folder: RunFolder, tmp_path: Path) -> None:
    path = hugging_face(folder.path / "checkpoints" / "hf-00000025")
    assert find_policy_checkpoint(folder, path) == Checkpoint(path, 25)
    stranger = hugging_face(tmp_path / "stranger")
    assert find_policy_checkpoint(folder, stranger) == Checkpoint(stranger, None)


def test_a_checkpoint_is_known_from_inside_its_folder_too(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_state(RunState(finished_steps=4))
    final = hugging_face(folder.path / "checkpoints" / "hf")
    resumable = Checkpoint(folder.path / "checkpoints" / "00000010", 10, resumable=True)
    monkeypatch.chdir(final.parent)
    assert find_policy_checkpoint(folder, Path("hf")) == Checkpoint(final, 4)
    assert find_policy_checkpoint(folder, Path("00000010")) == resumable
    monkeypatch.chdir(resumable.path)
    for spelled in (Path(), Path("../00000010")):
        assert find_policy_checkpoint(folder, spelled) == resumable


async def test_an_export_that_never_ends_is_given_up_with_what_to_do(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_grpo.lab.evaluate.policy_source.EXPORT_TIMEOUT_S", 0.01)
    checkpoint = Checkpoint(folder.path / "checkpoints" / "00000010", 10, resumable=True)
    with pytest.raises(WaitTimeout, match=r"00000010.*async-grpo export"):
        async with open_checkpoint(checkpoint, lambda _: None):
            pass


def test_without_a_final_checkpoint_it_says_what_there_is(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoints/hf: .*--checkpoint .*00000010"):
        find_policy_checkpoint(folder, None)
    (folder.path / "checkpoints" / "00000010").rmdir()
    with pytest.raises(ConfigError, match=r"checkpoints/hf: .*no checkpoint.*--live"):
        find_policy_checkpoint(folder, None)
    with pytest.raises(ConfigError, match=rf"{tmp_path} .*async-grpo export.*async-grpo convert"):
        find_policy_checkpoint(folder, tmp_path)


def test_a_run_folder_that_was_moved_is_found_where_it_is(folder: RunFolder, tmp_path: Path) -> None:
    moved = folder.path.rename(tmp_path / "renamed")
    config, found = load_chosen_run(None, [], moved)
    assert (config.run_dir, found.path) == (moved, moved)


def test_a_configuration_that_differs_from_the_runs_is_named(folder: RunFolder, tmp_path: Path) -> None:
    assert differences(config_of(runs_dir=tmp_path), folder) == []
    changed = config_of(runs_dir=tmp_path, seed=7, eval={"prompts": 4, "samples": 3})
    assert differences(changed, folder) == ["eval.samples", "seed"]


def test_a_live_run_is_its_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[ServerBeat] = []

    class Board:
        async def live_servers(self) -> list[ServerBeat]:
            return beats

        async def aclose(self) -> None: ...

    async def connect(*_: object) -> Board:
        return Board()

    config = config_of()
    monkeypatch.setattr("async_grpo.lab.evaluate.policy_source.find_run", lambda *_: config)
    monkeypatch.setattr("async_grpo.lab.evaluate.policy_source.connect_board", connect)
    with pytest.raises(ConfigError, match="no rollout server of the run test"):
        asyncio.run(find_live_run(None, [], tmp_path))
    beats.append(ServerBeat(name="rollout-0", pid=1, version=3))
    with pytest.raises(ConfigError, match=r"rollout-0.*rollout\.http\.port"):
        asyncio.run(find_live_run(None, [], tmp_path))
    beats.append(ServerBeat(name="rollout-1", pid=1, version=4, http="http://127.0.0.1:1"))
    assert asyncio.run(find_live_run(None, [], tmp_path)) == LiveRun(config, {"http://127.0.0.1:1": 4})


def type_in(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", ["eval", "chat"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which run?"),
        ([CONFIG], "there is no checkpoint"),
        ([CONFIG, "--checkpoint", "/nowhere"], "no folder /nowhere"),
        ([CONFIG, "--live"], "holds no run"),
        ([CONFIG, "--live", "--checkpoint", "x"], "different policies"),
        ([CONFIG, "--run-dir", "x"], "the run is named twice"),
        (["--run-dir", "/nowhere"], "not the folder of a run"),
        ([CONFIG, "-o", "max_stalenes=1"], "max_staleness?"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(
    command: str, words: list[object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = type_in(command, *words)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_nothing_is_overwritten_and_an_expected_answer_needs_a_question(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.touch()
    for words, said in (
        (["eval", CONFIG, "--json", there], "would be overwritten"),
        (["eval", CONFIG, "--save", there], "would be overwritten"),
        (["chat", CONFIG, "--answer", "4"], "/answer TEXT"),
    ):
        result = type_in(*words)
        assert result.exit_code == 1 and said in result.output
