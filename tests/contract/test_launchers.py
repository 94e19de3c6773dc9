"""What `async-grpo run` promises before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.local import run_locally
from async_grpo.app.launch.plan import RunPlan
from async_grpo.app.launch.run_folder import RunState, open_run, write_config
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)


def config(**changes: Any) -> RunConfig:
    return validate({"name": "one", "model": {"path": "any"}, **changes}, "test")


async def start(config: RunConfig, command: str = "") -> int:
    return await run_locally(RunPlan(config, config), fresh=False, command=command)


def begun(config: RunConfig) -> RunState:
    """The state of a run that was trained to its end."""
    folder = open_run(config)
    state = RunState(finished_steps=config.steps)
    write_config(folder, config, for_roles=config)
    folder.write_state(state)
    return state


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"launch": {"cores": {"rollout": [99999]}}}, "launch.cores.rollout .*99999"),
        (
            {"trainer": {"nodes": 2, "processes": 2, "rendezvous": {"address": "10.0.0.5"}}},
            "trainer.nodes is 2.* --node-rank",
        ),
    ],
)
async def test_a_run_that_cannot_be_started_here_leaves_no_trace(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await start(config(**changes))
    assert not list(Path.cwd().iterdir())


async def test_a_finished_run_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    state = begun(config())
    assert await start(config(), command="again") == 0
    assert open_run(config()).read_state() == state
    assert "this run is finished" in " ".join(capsys.readouterr().out.split())


async def test_a_run_that_another_process_holds_is_refused() -> None:
    begun(config())
    with open_run(config()).locked(), pytest.raises(ConfigError, match="another `async-grpo run`"):
        await start(config())
