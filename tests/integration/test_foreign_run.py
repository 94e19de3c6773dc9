"""A run that somebody else has on the same server is refused before anything of it is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.config import RedisConfig, RunConfig
from async_grpo.errors import ConfigError
from async_grpo.launch.run_folder import open_run
from async_grpo.launch.state_plane import open_state_plane
from async_grpo.staleness.policy import ReplayPolicy
from async_grpo.staleness.window import StalenessWindow
from buffer import connect


async def test_a_new_folder_never_takes_over_a_name_that_the_server_knows(
    redis_config: RedisConfig, tmp_path: Path
) -> None:
    theirs = await connect(
        redis_config, "shared", policy=ReplayPolicy(StalenessWindow(1, 3, 30)), lease_s=9, max_attempts=2
    )
    before = await theirs.stats()
    config = RunConfig.model_validate(
        {"name": "shared", "runs_dir": str(tmp_path), "model": {"random": {}}, "redis": redis_config.model_dump()}
    )
    with pytest.raises(ConfigError, match="already holds a run named shared"):
        async with open_state_plane(config, open_run(config), fresh=False):
            pass
    assert await theirs.stats() == before
    await theirs.aclose()
