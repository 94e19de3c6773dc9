"""Roles that are pinned to cores, with what they start; cores that are not there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from async_grpo.app.launch.plan import RunPlan
from async_grpo.app.launch.plan_table import plan_table
from async_grpo.app.launch.role_process import RoleProcess, RoleSpec, assign_cores, available_cores
from async_grpo.app.launch.role_specs import role_specs
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError

SAYS_ITS_CORES = "import os, subprocess, sys; print(sorted(os.sched_getaffinity(0)), flush=True)"
AND_ITS_CHILDS = f"{SAYS_ITS_CORES}; subprocess.run([sys.executable, '-c', {SAYS_ITS_CORES!r}])"

needs_affinity = pytest.mark.skipif(not available_cores(), reason="this system pins no process to a core")


def config(**cores: list[int]) -> RunConfig:
    launch: dict[str, Any] = {"cores": cores}
    return validate({"name": "cores", "model": {"path": "any"}, "rollout": {"servers": 2}, "launch": launch}, "test")


@needs_affinity
@pytest.mark.parametrize("cores", [(), (available_cores() or [0])[-1:]])
async def test_a_role_and_what_it_starts_run_on_its_cores_or_on_all(tmp_path: Path, cores: Sequence[int]) -> None:
    log = tmp_path / "role.log"
    spec = RoleSpec("role", [sys.executable, "-c", AND_ITS_CHILDS], log, 0, cores=tuple(cores))
    role = await RoleProcess.start(spec, "x")
    assert await role.wait() == 0
    assert log.read_text().split("\n")[:2] == [str(list(cores) or available_cores())] * 2


@needs_affinity
def test_every_role_of_a_side_gets_the_cores_of_that_side(tmp_path: Path) -> None:
    first = available_cores()[0]
    roles = role_specs(config(rollout=[first]), RunFolder(tmp_path), tmp_path)
    assert roles.trainer.cores == ()
    assert [server.cores for server in roles.servers] == [(first,), (first,)]


def test_a_core_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert assign_cores(config(trainer=[1], rollout=[0]), available=[0, 1]) == ((1,), (0,))
    with pytest.raises(ConfigError, match=r"launch\.cores\.trainer .*\b7\b.*0, 1"):
        assign_cores(config(trainer=[1, 7]), available=[0, 1])
    with pytest.raises(ConfigError, match="pins no process"):
        assign_cores(config(rollout=[0]), available=[])


def table(config: RunConfig) -> Table:
    """The table of a dry run."""
    return plan_table(RunPlan(config, config))


@needs_affinity
def test_a_dry_run_shows_the_cores_and_refuses_those_that_are_not_there() -> None:
    first = available_cores()[0]
    names, shown = (list(column.cells) for column in table(config(trainer=[first])).columns)
    assert str(shown[names.index("cores")]) == f"trainer: {first}"
    with pytest.raises(ConfigError, match=r"launch\.cores\.trainer .*99999"):
        table(config(trainer=[99999]))
    assert "cores" not in list(table(config()).columns[0].cells)
