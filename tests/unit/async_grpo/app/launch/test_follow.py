"""Who follows a run says what is missing; the run itself is in tests/faults/test_container_commands.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.app.launch.follow import RunFollower, follow_run
from async_grpo.app.launch.run_folder import RunFolder, open_run, write_config
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError, RoleFailed

SETTINGS = {"name": "small", "model": {"random": {}}, "redis": {"url": "redis://127.0.0.1:1", "timeout_s": 0.1}}


def test_a_run_with_its_own_server_needs_nobody_who_waits(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("{name: small, model: {random: {}}}")
    with pytest.raises(ConfigError, match=r"redis\.url.*--wait"):
        follow_run(file, print)


async def test_a_trainer_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.app.launch.follow.POLL_EVERY_S", 0.0)
    settings = SETTINGS | {"runs_dir": tmp_path, "launch": {"ready_timeout_s": 0.01}}
    with pytest.raises(RoleFailed, match=r"small.*redis://127\.0\.0\.1:1.*launch\.ready_timeout_s"):
        await RunFollower(RunConfig.model_validate(settings), print).follow()


async def test_a_run_that_waits_in_vain_for_its_trainer_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_grpo.app.launch.follow.POLL_EVERY_S", 0.0)
    config = RunConfig.model_validate(SETTINGS | {"runs_dir": tmp_path, "launch": {"ready_timeout_s": 0.01}})
    write_config(open_run(config), config, for_roles=config)
    with pytest.raises(RoleFailed):
        await RunFollower(config, print).follow()
    assert "no trainer has started the run small" in RunFolder(tmp_path / "small").read_state().failure
