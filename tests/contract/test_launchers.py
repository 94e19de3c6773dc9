"""What every launcher promises before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.base import Launcher, make_launcher
from async_grpo.app.launch.run_folder import RunState, open_run, write_config
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """The local launcher, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return make_launcher()


def config(**changes: Any) -> RunConfig:
    return validate({"name": "one", "model": {"path": "any"}, **changes}, "test")


def begun(config: RunConfig) -> RunState:
    """The state of a run that was trained to its end."""
    folder, state = open_run(config), RunState(finished_steps=config.steps)
    write_config(folder, config, for_roles=config)
    folder.write_state(state)
    return state


async def test_rendering_is_text_for_relative_files_and_writes_none_of_them(launcher: Launcher) -> None:
    for file, text in launcher.render(config()).items():
        assert text and not file.is_absolute()
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"launch": {"cores": {"rollout": [99999]}}}, "launch.cores.rollout names 99999"),
        (
            {"trainer": {"nodes": 2, "processes": 2, "rendezvous": {"address": "10.0.0.5"}}},
            "trainer.nodes is 2, .* --node-rank R",
        ),
    ],
)
async def test_a_run_that_cannot_be_started_here_leaves_no_trace(
    launcher: Launcher, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await launcher.launch(config(**changes), fresh=False, command="")
    assert not list(Path.cwd().iterdir())


async def test_a_finished_run_is_not_started_again(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    state = begun(config())
    assert await launcher.launch(config(), fresh=False, command="again") == 0
    assert open_run(config()).read_state() == state
    assert "this run is finished" in " ".join(capsys.readouterr().out.split())


async def test_a_run_that_another_process_holds_is_refused(launcher: Launcher) -> None:
    begun(config())
    with open_run(config()).locked(), pytest.raises(ConfigError, match="another `async-grpo run`"):
        await launcher.launch(config(), fresh=False, command="")
