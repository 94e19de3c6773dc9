"""Roles that are started one by one: what each would become, with which configuration and which environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from async_grpo.app.launch import single_role
from async_grpo.app.launch.role_specs import trainer_environment
from async_grpo.config import RunConfig, load, validate

QUICKSTART = Path(__file__).parents[5] / "configs" / "quickstart.yaml"
TWO_NODES = ["trainer.nodes=2", "trainer.processes=2", "trainer.rendezvous.address=10.0.0.5"]
SERVER = "redis.url=redis://10.0.0.5:6379"


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], Path]:
    """Starts a role and returns the configuration that it is told to read."""
    started: list[list[str]] = []

    async def model(*_: object) -> Path:
        return tmp_path / "model"

    monkeypatch.setattr(single_role, "prepare_model", model)
    monkeypatch.setattr(single_role, "_prepare_to_join", model)
    monkeypatch.setattr(os, "execve", lambda _file, argv, _environment: started.append(argv))

    def start(role: Callable[[], int]) -> Path:
        role()
        return Path(started[-1][started[-1].index("--config") + 1])

    return start


def test_every_role_reads_what_its_own_machine_has_though_all_share_the_folder(
    tmp_path: Path, become: Callable[[Callable[[], int]], Path]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "mount").symlink_to(tmp_path / "runs")
    here, there = [SERVER, f"runs_dir={tmp_path}/runs"], [f"runs_dir={tmp_path}/mount"]
    relay = ["weights.relay_bind=tcp://0.0.0.0:5610", "weights.relay_advertise=10.0.0.7"]
    elsewhere = [*there, "redis.url=redis://192.168.0.5:6379", *relay]
    files = [
        become(lambda: single_role.run_trainer(QUICKSTART, [*TWO_NODES, *here], 0)),
        become(lambda: single_role.run_trainer(QUICKSTART, [*TWO_NODES, *elsewhere], 1)),
        become(lambda: single_role.run_rollout(QUICKSTART, here, "rollout-a")),
        become(lambda: single_role.run_rollout(QUICKSTART, elsewhere, "rollout-b")),
    ]
    assert len({file.resolve() for file in files}) == len(files)
    assert [own_values(file) for file in files] == [
        (tmp_path / "runs", "redis://10.0.0.5:6379", None),
        (tmp_path / "mount", "redis://192.168.0.5:6379", "10.0.0.7"),
    ] * 2


def test_node_0_may_be_another_machine_after_a_restart(
    tmp_path: Path, become: Callable[[Callable[[], int]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(path: Path, *given: str) -> RunConfig:
        return load(become(lambda: single_role.run_trainer(path, given, None)))

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.5")
    first = started(QUICKSTART, *TWO_NODES[:2], SERVER, f"runs_dir={tmp_path}")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.6")
    second = started(first.run_dir)  # as the jobs of Slurm and Ray name it
    assert [config.trainer.rendezvous.address for config in (first, second)] == ["10.0.0.5", "10.0.0.6"]


def own_values(file: Path) -> tuple[Path, str | None, str | None]:
    config = load(file)
    return config.runs_dir, config.redis.url, config.weights.relay_advertise


def test_a_server_that_joins_a_run_of_this_machine_reads_a_copy_of_its_own(
    tmp_path: Path, become: Callable[[Callable[[], int]], Path]
) -> None:
    trainer = become(lambda: single_role.run_trainer(QUICKSTART, [SERVER, f"runs_dir={tmp_path}"], None))
    run_dir = load(trainer).run_dir
    joined = become(lambda: single_role.join_run(run_dir, "one-more"))
    assert joined == run_dir / "roles" / "one-more.yaml"
    assert load(joined) == load(trainer), "its patience with the server is that of a role, not that of a command"


def test_memory_is_kept_on_a_cpu_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    config = validate({"name": "kept", "runs_dir": tmp_path, "model": {"random": {}}}, "test")
    assert "trim_threshold" in trainer_environment(config, {})["GLIBC_TUNABLES"]
    assert trainer_environment(config, {"GLIBC_TUNABLES": "mine"})["GLIBC_TUNABLES"] == "mine"
    trainer = config.trainer.model_copy(update={"platform": "cuda"})
    assert "GLIBC_TUNABLES" not in trainer_environment(config.model_copy(update={"trainer": trainer}), {})
