"""The jobs of `async-grpo launch slurm`, without Slurm; on a real one: tests/faults/test_slurm.py."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.app.launch.clusters.slurm import make_job_scripts, submit_run
from async_grpo.app.launch.single_role import ProcessPlacement, find_placement, rank_environment
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError, DependencyError

REACHABLE = {"redis": {"url": "redis://10.0.0.5:6379"}, "weights": {"bind": "tcp://0.0.0.0:5600"}}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.5"}


def config(**changes: Any) -> RunConfig:
    return validate({"name": "one", "model": {"path": "any"}, **REACHABLE, **changes}, "test")


def two_nodes(**rendezvous: Any) -> RunConfig:
    return config(trainer={"nodes": 2, "processes": 2, "rendezvous": rendezvous})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"redis": {}}, "redis.url is not set"),
        ({"redis": {"url": "redis://localhost:6379"}}, "redis.url is redis://localhost:6379"),
        ({"weights": {}}, "weights.bind is tcp://127.0.0.1:0"),
    ],
)
def test_roles_that_could_not_reach_each_other_are_not_submitted(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_job_scripts(config(**changes), 2)


def test_nothing_is_written_where_slurm_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DependencyError, match="sbatch"):
        submit_run(config(), None, print)
    assert not list(tmp_path.iterdir())


def test_the_options_of_a_site_come_last_so_that_they_win() -> None:
    scripts = make_job_scripts(config(launch={"slurm": {"rollout": ["--partition=spot", "--array=0-9%4"]}}), 2)
    options = re.findall("#SBATCH (.*)", scripts["rollout"])
    assert options[-3:] == ["--array=0-1", "--partition=spot", "--array=0-9%4"]


def test_a_dry_run_prints_what_would_be_submitted_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = ["-o", "redis.url=redis://10.0.0.5:6379", "-o", "weights.bind=tcp://0.0.0.0:5600", "--servers", "3"]
    printed = CliRunner().invoke(app, ["launch", "slurm", "quickstart", *told, "--dry-run"])
    assert printed.exit_code == 0, printed.output
    assert re.findall("# sbatch --parsable (.*) runs", printed.output)[1:] == [
        "--dependency=after:TRAINER_JOB",
        "--dependency=afterok:TRAINER_JOB",
    ]
    assert "#SBATCH --array=0-2\n" in printed.output
    assert not list(tmp_path.iterdir())


def ends(tmp_path: Path, role: str, *codes: int, srun: str = "exit $CODE") -> tuple[int, list[str]]:
    """The exit code of a job whose role ends so, once for each start, and the commands that it gave Slurm."""
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.yaml").touch()
    (tmp_path / "runs" / "one" / "slurm").mkdir()
    called = tmp_path / "called"
    for name, body in {
        "srun": srun,
        "squeue": "echo RUNNING",
        "scancel": f'echo scancel "$@" >> {called}',
        "scontrol": f'echo scontrol "$@" >> {called}',
        "sleep": "exit 0",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = make_job_scripts(
        config(runs_dir=str(tmp_path / "runs"), launch={"restarts": {"trainer": 1, "rollout": 1}}), 1
    )[role]
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
    }
    if role == "rollout":  # the array's last task, whose own number is the array's
        environment |= {"SLURM_JOB_ID": "6", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "0"}
    for code in codes:
        environment["CODE"] = str(code)
        ended = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, timeout=10)
    return ended.returncode, called.read_text().splitlines() if called.exists() else []


def test_a_role_gets_the_cores_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert ends(tmp_path, "trainer", 0, srun='[ "$SRUN_CPUS_PER_TASK" = 8 ]') == (0, [])


def test_a_role_that_is_done_ends_its_job(tmp_path: Path) -> None:
    assert ends(tmp_path, "trainer", 0) == (0, [])


def test_preempted_roles_are_requeued_as_often_as_it_happens(tmp_path: Path) -> None:
    assert ends(tmp_path, "rollout", 75, 75, 75) == (75, ["scontrol requeue 6_0"] * 3)


def test_a_trainer_that_fails_too_often_takes_its_servers_with_it(tmp_path: Path) -> None:
    code, called = ends(tmp_path, "trainer", 1, 1)
    assert (code, called[0]) == (1, "scontrol requeue 7")
    assert re.fullmatch("scancel --quiet --user=.* --name=one-[0-9a-f]{8}-rollout", called[1])


def test_a_run_of_the_same_name_in_another_folder_has_other_jobs() -> None:
    def names(folder: str) -> set[str]:
        scripts = make_job_scripts(config(runs_dir=folder), 2)
        return {name for script in scripts.values() for name in re.findall(r"--(?:job-)?name=(\S+)", script)}

    assert names("/home/ada/runs") == names("/home/ada/runs")
    assert names("/home/ada/runs").isdisjoint(names("/home/bob/runs"))


def test_a_fault_of_the_configuration_is_not_tried_again(tmp_path: Path) -> None:
    assert ends(tmp_path, "rollout", 78) == (78, [])


def test_srun_says_which_node_this_is_and_where_node_0_is() -> None:
    assert find_placement(two_nodes(), None, SRUN) == ProcessPlacement(1, "10.0.0.5")
    assert find_placement(two_nodes(address="10.9.9.9"), 0, SRUN) == ProcessPlacement(0, "10.9.9.9"), (
        "the user knows better"
    )


@pytest.mark.parametrize(
    "variables",
    [("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"), ("RANK", "WORLD_SIZE", "MASTER_ADDR")],
)
def test_other_starters_say_it_in_variables_of_their_own(variables: tuple[str, ...]) -> None:
    environment = dict(zip(variables, ("1", "2", "10.0.0.5"), strict=True))
    assert find_placement(two_nodes(), None, environment) == ProcessPlacement(1, "10.0.0.5")
    three = config(trainer={"nodes": 3, "processes": 3, "rendezvous": {"address": "10.0.0.5"}})
    assert find_placement(three, 2, environment).number == 2, "whoever says it all needs no environment"
    with pytest.raises(ConfigError, match=rf"2 .*{variables[1]}.*trainer\.nodes is 3"):
        find_placement(three, None, environment)


@pytest.mark.parametrize(
    "variables",
    [
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID"),
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"),
    ],
)
def test_who_starts_a_process_for_each_rank_has_placed_the_ranks(variables: tuple[str, ...]) -> None:
    environment = dict(zip(variables, ("3", "4", "127.0.0.9", "1"), strict=True))
    four = config(trainer={"nodes": 2, "processes": 4})
    place = find_placement(four, None, environment)
    assert place == ProcessPlacement(3, "127.0.0.9", local_rank=1)
    assert rank_environment(four, place, {}) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.9",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert rank_environment(four, place, {"MASTER_PORT": "7"})["MASTER_PORT"] == "7"
    alone = config(trainer={"processes": 4})
    assert find_placement(alone, None, environment) == place, "the ranks of a single node too"
    assert find_placement(alone, None, {**environment, variables[1]: "1", variables[0]: "0"}) == ProcessPlacement(0), (
        "a node"
    )


def test_nodes_that_could_not_meet_are_refused_before_they_wait() -> None:
    with pytest.raises(ConfigError, match=r"srun .*\b2\b.*trainer\.nodes is 3"):
        find_placement(config(trainer={"nodes": 3, "processes": 3}), None, SRUN)
    with pytest.raises(ConfigError, match=r"trainer\.rendezvous\.address is not set"):
        find_placement(two_nodes(), 1, {})


def on_npus(**slurm: str) -> RunConfig:
    return config(
        trainer={"platform": "npu", "processes": 8, "tensor_parallel": 8},
        rollout={"vllm": {"platform": "ascend", "tensor_parallel": 4}},
        launch={"slurm": slurm},
    )


def test_jobs_on_ascend_request_npus_by_the_name_that_the_site_has_for_them() -> None:
    scripts = make_job_scripts(on_npus(), 2)
    assert "#SBATCH --gres=npu:8\n" in scripts["trainer"]
    assert "#SBATCH --gres=npu:4\n" in scripts["rollout"]
    assert "--gres" not in scripts["report"]
    assert "#SBATCH --gres=ascend910:4\n" in make_job_scripts(on_npus(npu_gres="ascend910"), 2)["rollout"]
    assert "--gres" not in make_job_scripts(on_npus(npu_gres=""), 2)["rollout"]


@pytest.mark.parametrize(
    ("granted", "seen"),
    [
        ("npu:4(IDX:4-7)", "4,5,6,7"),
        ("npu:910c:3(IDX:0,14-15)", "0,14,15"),
        ("npu:1(IDX:9)", "9"),
        ("gpu:1(IDX:1)", ""),
    ],
)
def test_a_server_sees_the_npus_that_slurm_has_granted_and_no_others(tmp_path: Path, granted: str, seen: str) -> None:
    script = make_job_scripts(on_npus(), 2)["rollout"]
    start = script.index("# Slurm sets no variable")
    lines = script[start : script.index("# A file for each task")]
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '   JobId=7'\necho '     Nodes=n1 CPU_IDs=0-3 Mem=0 GRES={granted}'\n")
    scontrol.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "job": "7"}
    shown = ["bash", "-c", f"{lines}echo $ASCEND_RT_VISIBLE_DEVICES"]
    assert subprocess.run(shown, env=environment, capture_output=True, text=True, check=True).stdout.strip() == seen
    chosen = subprocess.run(
        shown, env={**environment, "ASCEND_RT_VISIBLE_DEVICES": "2"}, capture_output=True, text=True, check=True
    )
    assert chosen.stdout.strip() == "2"
