"""A run that somebody else has on the same server is refused before anything of it is touched."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.app.launch.run_folder import RunFolder, RunState, open_run, write_config
from async_grpo.app.launch.state_plane import check_fresh, open_state_plane
from async_grpo.app.runs.run import Run
from async_grpo.app.runs.upkeep import Wanted, choose_removals, delete_part
from async_grpo.config import RedisConfig, RunConfig, dump
from async_grpo.errors import ConfigError
from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.wire.board import ServerBeat
from buffer import connect, connect_board, run_exists
from buffer import open_run as buffer_of


def config_in(folder: Path, redis: RedisConfig, name: str, **changes: object) -> RunConfig:
    fields = {"name": name, "runs_dir": str(folder), "model": {"random": {}}, "redis": redis.model_dump(), **changes}
    return RunConfig.model_validate(fields)


async def begin(config: RunConfig) -> RunFolder:
    """As `async-grpo run` does, up to its roles."""
    folder = open_run(config)
    async with open_state_plane(config, folder, fresh=False) as plane:
        write_config(folder, config, for_roles=plane.config)
    return folder


@contextlib.asynccontextmanager
async def theirs(config: RunConfig) -> AsyncIterator[None]:
    """Whatever is done meanwhile, nothing of this run is changed."""
    buffer = await buffer_of(config)
    before = await buffer.stats()
    yield
    assert await buffer.stats() == before
    await buffer.aclose()


async def start_over(config: RunConfig, answer: bool | None) -> list[str]:
    """--fresh, up to what follows its checks; returns what was asked. None: nobody is to be asked."""
    asked: list[str] = []

    def confirm(question: str) -> bool:
        assert answer is not None, question
        asked.append(question)
        return answer

    await check_fresh(config, confirm)
    async with open_state_plane(config, open_run(config, fresh=True), fresh=True):
        return asked


async def test_a_new_folder_never_takes_over_a_name_that_the_server_knows(
    redis_config: RedisConfig, tmp_path: Path
) -> None:
    theirs = await connect(
        redis_config, "shared", policy=ReplayPolicy(StalenessWindow(1, 3, 30)), lease_s=9, max_attempts=2
    )
    before = await theirs.stats()
    config = config_in(tmp_path, redis_config, "shared")
    with pytest.raises(ConfigError, match=r"redis\.url .*shared, .*-o name="):
        async with open_state_plane(config, open_run(config), fresh=False):
            pass
    assert await theirs.stats() == before
    await theirs.aclose()


async def test_fresh_leaves_a_run_of_another_folder_alone(redis_config: RedisConfig, tmp_path: Path) -> None:
    ours, mine = (config_in(tmp_path / folder, redis_config, "same-name") for folder in ("ours", "mine"))
    await begin(ours)
    precious = open_run(mine).path / "checkpoints"
    precious.mkdir()
    write_config(RunFolder(precious.parent), mine, for_roles=mine)  # it was once run on another server
    async with theirs(ours):
        with pytest.raises(ConfigError, match=f":{tmp_path}/ours/same-name, .*{tmp_path}/mine/same-name"):
            await start_over(mine, None)
        with pytest.raises(ConfigError, match=f":{tmp_path}/ours/same-name, "):
            await begin(mine)
    assert precious.exists()


async def test_fresh_leaves_a_run_that_is_alive_alone(redis_config: RedisConfig, tmp_path: Path) -> None:
    config = config_in(tmp_path, redis_config, "alive")
    folder = await begin(config)
    board = await connect_board(config.redis, config.name)
    await board.announce_server(ServerBeat(name="rollout-7", pid=1, version=0), ttl_s=60)
    async with theirs(config):
        with pytest.raises(ConfigError, match=r"run alive .*rollout-7 .*--fresh"):
            await start_over(config, None)
    assert folder.config_file.exists()
    await board.aclose()


async def test_fresh_asks_before_it_deletes_a_run_from_a_shared_server(
    redis_config: RedisConfig, tmp_path: Path
) -> None:
    config = config_in(tmp_path, redis_config, "dead")
    folder = await begin(config)
    first = folder.origin
    async with theirs(config):
        with pytest.raises(ConfigError, match=r"--fresh was not confirmed.* dead "):
            await start_over(config, False)
    [question] = await start_over(config, True)
    assert "run dead " in question and str(folder.path) in question
    assert folder.origin != first
    await begin(config)  # and it is resumed as its own


def test_the_command_asks_before_anything_is_deleted_and_where_nobody_can_answer_names_the_option(
    redis_config: RedisConfig, tmp_path: Path
) -> None:
    config = config_in(tmp_path, redis_config, "by-command")
    folder = asyncio.run(begin(config))
    file = tmp_path / "config.yaml"
    file.write_text(dump(config))
    done = CliRunner().invoke(app, ["run", str(file), "--fresh"])
    assert (done.exit_code, folder.config_file.exists()) == (1, True)
    assert "no terminal" in " ".join(done.output.split()) and "--yes" in done.output


async def test_a_run_whose_folder_was_deleted_is_started_over_where_it_was(
    redis_config: RedisConfig, tmp_path: Path
) -> None:
    config = config_in(tmp_path, redis_config, "without-folder")
    shutil.rmtree((await begin(config)).path)
    with pytest.raises(ConfigError, match=r"without-folder, .*--fresh"):
        await begin(config)
    assert len(await start_over(config, True)) == 1


async def test_a_run_whose_folder_was_moved_is_resumed(redis_config: RedisConfig, tmp_path: Path) -> None:
    before, after = (config_in(tmp_path / place, redis_config, "moved") for place in ("before", "after"))
    await begin(before)
    (tmp_path / "before").rename(tmp_path / "after")
    await begin(after)


async def test_fresh_asks_nothing_where_the_server_knows_no_such_run(redis_config: RedisConfig, tmp_path: Path) -> None:
    config = config_in(tmp_path, redis_config, "never-begun")
    assert await start_over(config, None) == []
    assert await run_exists(config.redis, config.name)


async def test_clean_removes_the_keys_of_finished_runs_alone(redis_config: RedisConfig, tmp_path: Path) -> None:
    done, open_ = (config_in(tmp_path, redis_config, name) for name in ("clean-done", "clean-open"))
    for config in (done, open_):
        await begin(config)
    RunFolder(done.run_dir).write_state(RunState(finished_steps=done.steps))
    command = ("runs", "clean", str(tmp_path), "--redis", "--yes")
    result = await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.output.count("deleted keys of") == 1
    assert not await run_exists(redis_config, done.name)
    assert await run_exists(redis_config, open_.name)
    assert done.run_dir.exists()


async def test_clean_leaves_the_keys_of_another_folders_run(redis_config: RedisConfig, tmp_path: Path) -> None:
    ours, mine = (config_in(tmp_path / folder, redis_config, "clean-both") for folder in ("ours", "mine"))
    await begin(ours)
    folder = open_run(mine)
    write_config(folder, mine, for_roles=mine)
    removals = choose_removals([Run(folder.path)], Wanted(), now_s=0.0)
    async with theirs(ours):
        with pytest.raises(ConfigError, match=f"run clean-both .*:{tmp_path}/ours/clean-both"):
            await delete_part(removals[0])
    assert folder.path.exists()
