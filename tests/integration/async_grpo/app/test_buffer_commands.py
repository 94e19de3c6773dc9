"""`async-grpo buffer ...` as typed, on a run that a scripted server and trainer have made on a real server."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.app.launch.run_folder import RunFolder, write_config
from async_grpo.config import RunConfig, dump, load
from async_grpo.config.buffer import RedisConfig
from buffer import BufferStats, RedisBuffer, connect
from tests.support.buffer_cases import admit, finish, policy, tasks, train

CONFIGS = Path(__file__).parents[4] / "configs"


def type_in(*words: object) -> Result:
    return CliRunner().invoke(app, ["buffer", *map(str, words)], env={"COLUMNS": "200"})


def began(redis: RedisConfig, runs_dir: Path) -> RunFolder:
    """A run with groups 0 and 1 trained, 2 READY, 3 given back; its folder is as `async-grpo run` makes it."""
    quickstart = load(CONFIGS / "quickstart.yaml", [f"name=run-{uuid.uuid4().hex[:8]}", f"runs_dir={runs_dir}"])
    config = quickstart.model_copy(update={"redis": redis})
    folder = RunFolder(config.run_dir)
    folder.path.mkdir()
    write_config(folder, config, for_roles=config)

    async def live() -> None:
        async with joined(folder) as buffer:
            await buffer.put_tasks(tasks(0, 20))
            await buffer.rollback(0)
            *finished, left = await admit(buffer, 4)
            await finish(buffer, *finished)
            await buffer.give_back(left)
            await train(buffer, 0)

    asyncio.run(live())
    return folder


@asynccontextmanager
async def joined(folder: RunFolder) -> AsyncIterator[RedisBuffer]:
    """The buffer as every process of the run has it; it joins with the parameters that the run began with."""
    config = config_of(folder)
    buffer = await connect(config.redis, config.name, policy=policy(S=3, P=2), lease_s=30.0, max_attempts=3)
    yield buffer
    await buffer.aclose()


@pytest.fixture(scope="module")
def folder(redis_config: RedisConfig, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """For commands that only look."""
    return began(redis_config, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def own(redis_config: RedisConfig, tmp_path: Path) -> RunFolder:
    """For commands that change the run."""
    return began(redis_config, tmp_path)


def config_of(folder: RunFolder) -> RunConfig:
    return load(folder.roles_file)


def stats_of(folder: RunFolder) -> BufferStats:
    async def look() -> BufferStats:
        async with joined(folder) as buffer:
            return await buffer.stats()

    return asyncio.run(look())


def test_the_counters_of_a_live_run_are_shown(folder: RunFolder) -> None:
    result = type_in("stats", "--run-dir", folder.path)
    assert result.exit_code == 0, result.output
    for part in ("2 of 8 = (S + 1) * P", "head version 1, epoch 1", "1 in flight, 1 ready", "2 trained", "1 age 1"):
        assert part in result.output


def test_the_counters_are_there_for_programs(folder: RunFolder) -> None:
    result = type_in("stats", "--run-dir", folder.path, "--json")
    content = json.loads(result.output)
    assert (content["stats"]["active"], content["stats"]["released"]["trained"]) == (2, 2)
    assert content["policy"]["window"]["max_staleness"] == 3
    assert content["memory"]["used_bytes"] > 0


def test_a_run_is_found_by_its_configuration(folder: RunFolder) -> None:
    name, runs_dir = folder.path.name, folder.path.parent
    result = type_in("stats", CONFIGS / "quickstart.yaml", "-o", f"name={name}", "-o", f"runs_dir={runs_dir}", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["run"] == name


def test_a_run_without_a_folder_is_found_by_the_address_of_its_server(folder: RunFolder, tmp_path: Path) -> None:
    config = config_of(folder)
    overrides = (f"name={config.name}", f"runs_dir={tmp_path / 'elsewhere'}", f"redis.url={config.redis.url}")
    arguments = [part for override in overrides for part in ("-o", override)]
    result = type_in("stats", CONFIGS / "quickstart.yaml", *arguments, "--json")
    assert result.exit_code == 0, result.output


def test_groups_are_listed_and_one_is_shown_whole(folder: RunFolder) -> None:
    listed = type_in("inspect", "--run-dir", folder.path)
    assert listed.exit_code == 0, listed.output
    for part in ("kept 0", "kept 1", "ready 2", "inflight 3"):
        assert part in listed.output
    shown = type_in("inspect", "--run-dir", folder.path, "2")
    assert shown.exit_code == 0, shown.output
    for part in ("group 2:", "prompt  task 2", "int32["):
        assert part in shown.output
    as_json = type_in("inspect", "--run-dir", folder.path, "3", "--json")
    assert json.loads(as_json.output)["task"]["prompt_tokens"] == [3]


def test_a_run_is_drained_and_goes_on(own: RunFolder) -> None:
    drained = type_in("drain", "--run-dir", own.path, "--timeout", "0")
    assert drained.exit_code == 1
    assert "1 groups in flight (0 leased to a server, 1 without one)" in " ".join(drained.output.split())
    assert stats_of(own).horizon == 0
    assert "stopped by" in type_in("stats", "--run-dir", own.path).output
    resumed = type_in("drain", "--run-dir", own.path, "--resume")
    assert (resumed.exit_code, resumed.output) == (0, "admission is open again\n")
    assert stats_of(own).horizon == 200
    assert "nothing changed" in type_in("drain", "--run-dir", own.path, "--resume").output


def test_a_drain_may_discard_what_is_ready(own: RunFolder) -> None:
    async def finish_what_is_in_flight() -> None:
        async with joined(own) as buffer:
            await finish(buffer, *await admit(buffer, 1))

    asyncio.run(finish_what_is_in_flight())
    result = type_in("drain", "--run-dir", own.path, "--timeout", "20", "--discard-ready")
    assert result.exit_code == 0, result.output
    assert "2 READY groups were released as stale" in result.output
    stats = stats_of(own)
    assert (stats.ready, stats.inflight, stats.released["stale"]) == (0, 0, 2)


@pytest.mark.parametrize("ending", ["jsonl", "msgpack"])
def test_groups_are_exported(folder: RunFolder, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"groups.{ending}"
    result = type_in("export", "--run-dir", folder.path, "--to", file)
    assert result.exit_code == 0, result.output
    assert "3 groups" in result.output
    again = type_in("export", "--run-dir", folder.path, "--to", file)
    assert again.exit_code == 1 and "not overwritten" in again.output


def test_only_the_states_asked_for_are_exported(folder: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "ready.jsonl"
    assert type_in("export", "--run-dir", folder.path, "--to", file, "--state", "ready").exit_code == 0
    assert [json.loads(line)["seq"] for line in file.read_text().splitlines()] == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stats"], "which run?"),
        (["stats", "--run-dir", "/nowhere"], "no run that was started"),
        (["stats", CONFIGS / "quickstart.yaml", "--run-dir", "/nowhere"], "Omit CONFIG"),
        (["stats", CONFIGS / "quickstart.yaml", "-o", "name=never-started"], "no run that was started"),
        (["inspect", CONFIGS / "quickstart.yaml", "first"], "is not an ID"),
        (["export", "--run-dir", "RUN", "--to", "groups.csv"], ".jsonl"),
        (["export", "--run-dir", "RUN", "--to", "groups.jsonl", "--state", "waiting"], "there is no --state waiting"),
        (["inspect", "--run-dir", "RUN", "999"], "no records of group 999"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(folder: RunFolder, words: list[object], message: str) -> None:
    result = type_in(*(folder.path if word == "RUN" else word for word in words))
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_run_whose_embedded_server_is_gone_says_so(own: RunFolder) -> None:
    written = yaml.safe_load(own.roles_file.read_text())
    written["redis"]["url"] = f"unix://{own.path}/server/server.sock"
    own.roles_file.write_text(yaml.safe_dump(written))
    own.config_file.write_text(dump(config_of(own).model_copy(update={"redis": RedisConfig()})))
    result = type_in("stats", "--run-dir", own.path)
    assert result.exit_code == 1
    assert "is not running" in result.output
