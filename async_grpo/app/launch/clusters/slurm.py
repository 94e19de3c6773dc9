"""`async-grpo launch slurm`: a run as Slurm jobs. Slurm places, ends and requeues its roles.

    trainer   one job: srun starts `async-grpo trainer` once on each of trainer.nodes
    rollout   an array of rollout.servers tasks, each `async-grpo rollout`; starts after the trainer
    report    starts after the trainer has finished, waits for the end of the run and writes its report

A role ends for one of four reasons, and the batch script of its job decides what comes next:

    0   the run is over                      the job ends
    75  SIGTERM: preemption or time limit    the role has saved or given back what it could; it is requeued
    78  the configuration is at fault        the job ends; if it is the trainer's, the servers are cancelled too
    else: it failed                          requeued, launch.restarts times; then as for 78

`scancel` sends the same SIGTERM, but ends the job. Slurm kills what is left KillWait later.
"""

from __future__ import annotations

import getpass
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from async_grpo.app.launch.node_plan import check_reachable
from async_grpo.app.launch.role_specs import EXIT_STOPPED, make_stoppable
from async_grpo.app.launch.run_folder import open_run, write_config
from async_grpo.config import RunConfig
from async_grpo.errors import EXIT_CONFIG, ConfigError, DependencyError
from async_grpo.utils.files import write_atomic
from trainer.platform import Platform, select_platform

_SUBMIT_S = 60.0

_SCRIPT = """\
#!/bin/bash
{directives}
{setup}
if [ ! -f {config} ]; then
    echo "{config} is not on $(hostname): set runs_dir to a folder that all nodes share" >&2
    exit {fault}
fi
role_name={name}
# The last task of an array has the number of the array as SLURM_JOB_ID, which names all of its tasks.
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # it does not inherit them
{show_npus}\
# A file for each task (%t) is written by the task itself. Through srun, the step would last for a minute after
# its role, as long as a process that the role has left behind keeps its output open.
srun --kill-on-bad-exit=0 --open-mode=append --output={folder}/$role_name.%t.log \
    bash -c {task} async-grpo "$role_name"
code=$?
[ $code = 0 ] && exit 0
failures={folder}/failures-$job
[ $code = {stopped} ] || echo $code >> $failures
count=$(cat $failures 2>/dev/null | wc -l)
if [ $code != {fault} ] && [ $count -le {restarts} ]; then
    [ "$(squeue --noheader --jobs $job --format %T)" = RUNNING ] || exit $code
    echo "requeued after exit code $code ($count of {restarts} failures)"
    scontrol requeue $job
    sleep 60
fi
{give_up}exit $code
"""

_SHOW_NPUS = """\
# Slurm sets no variable for generic resources other than GPUs. Without one, all roles of a node take its first NPUs.
if [ -z "${{ASCEND_RT_VISIBLE_DEVICES:-}}" ]; then
    granted=$(scontrol show job --details $job | grep -o '{gres}[^ ,(]*(IDX:[0-9,-]*)' | head -n 1)
    ranges=$(echo "$granted" | sed 's/.*IDX://; s/)//; s/,/ /g')
    npus=$(for range in $ranges; do seq ${{range%-*}} ${{range#*-}}; done | paste -sd,)
    [ -z "$npus" ] || export ASCEND_RT_VISIBLE_DEVICES=$npus
fi
"""


def make_job_scripts(config: RunConfig, servers: int, *, trainer: bool = True) -> dict[str, str]:
    """Return role -> batch script, in the order of submission. Raises ConfigError for a run whose roles could not reach
    each other."""
    check_reachable(config)
    command = [sys.executable, "-m", "async_grpo.app.cli.main"]
    run = str(_run_dir(config))
    cancel = f"scancel --quiet --user={shlex.quote(getpass.getuser())} --name={_job(config, 'rollout')}\n"
    stop_s = int(config.launch.stop_timeout_s)
    extra, platform = config.launch.slurm, select_platform(config.trainer.platform)
    generates = select_platform(config.rollout.limits.platform)
    nodes = [f"--nodes={config.trainer.nodes}", "--ntasks-per-node=1", f"--signal=TERM@{stop_s + 10}"]
    array = ["--nodes=1", "--ntasks=1", f"--signal=TERM@{stop_s + 10}", f"--array=0-{servers - 1}"]
    scripts = {}
    if trainer:
        options = [*nodes, *_devices(config, platform, config.trainer.processes_per_node), *extra.trainer]
        task = shlex.join([*command, "trainer", run])
        show = _show_npus(config, platform) if config.trainer.nodes == 1 else ""
        restarts = config.launch.restarts.trainer
        scripts["trainer"] = _script(config, "trainer", options, task, restarts, give_up=cancel, show_npus=show)
    if servers:
        options = [*array, *_devices(config, generates, config.rollout.limits.devices), *extra.rollout]
        task = f'{shlex.join([*command, "rollout", run])} --name "$1"'
        show, restarts = _show_npus(config, generates), config.launch.restarts.rollout
        scripts["rollout"] = _script(config, "rollout", options, task, restarts, show_npus=show)
    if trainer:
        options = ["--nodes=1", "--ntasks=1", "--kill-on-invalid-dep=yes", *extra.report]
        task = shlex.join([*command, "runs", "report", run, "--wait"])
        scripts["report"] = _script(config, "report", options, task, config.launch.restarts.trainer)
    return scripts


def _devices(config: RunConfig, platform: Platform, count: int) -> list[str]:
    """Return the sbatch options that request `count` devices per node."""
    if platform.name == "cuda":
        return [f"--gpus-per-node={count}"]
    gres = config.launch.slurm.npu_gres
    return [f"--gres={gres}:{count}"] if platform.name == "npu" and gres else []


def _show_npus(config: RunConfig, platform: Platform) -> str:
    """Return the script lines that make only the granted NPUs visible to the role of a job on one node."""
    gres = config.launch.slurm.npu_gres
    return _SHOW_NPUS.format(gres=gres) if platform.name == "npu" and gres else ""


def submit_run(config: RunConfig, servers: int | None, report_progress: Callable[[str], None]) -> None:
    """Submit the jobs of the run. If its trainer is queued or running already, submit an array of additional servers.

    Raises ConfigError for a run that cannot be started on Slurm, before anything is written or submitted;
    DependencyError without Slurm's commands.
    """
    if shutil.which("sbatch") is None:
        raise DependencyError(
            "sbatch is not on the PATH of this machine. Run `async-grpo launch slurm` where jobs are submitted (a "
            "login node), or look at what it would submit with --dry-run"
        )
    there = _slurm("squeue", "--noheader", "--me", f"--name={_job(config, 'trainer')}", "--format=%i").split()
    if there and servers is None:
        raise ConfigError(
            f"the trainer of {config.name} is job {there[0]} already. Pass --servers N to add N rollout servers, or "
            f"stop the run first: {_stop(config)}"
        )
    scripts = make_job_scripts(config, config.rollout.servers if servers is None else servers, trainer=not there)
    folder = open_run(config)
    write_config(folder, config, for_roles=config)
    _folder(config).mkdir(exist_ok=True)
    submitted = {"trainer": there[0]} if there else {}
    for role, script in scripts.items():
        file = write_atomic(_folder(config) / f"{role}.sbatch", script)
        submitted[role] = (
            _slurm("sbatch", "--parsable", *dependency_options(role, submitted), str(file)).split(";")[0].strip()
        )
        report_progress(f"{role}: job {submitted[role]} ({file})")
    report_progress(
        f"logs: {_folder(config)}; queue: squeue --me; a server less: scancel JOB_TASK; stop the run: {_stop(config)}"
    )


def _stop(config: RunConfig) -> str:
    """Return the command that stops the run."""
    return f"scancel --me --name={_job(config, 'trainer')},{_job(config, 'rollout')}"


def dependency_options(role: str, submitted: Mapping[str, str]) -> list[str]:
    """Return the sbatch option for the order of jobs: servers after the trainer's start, the report after its end."""
    kind = {"rollout": "after", "report": "afterok"}.get(role)
    return [f"--dependency={kind}:{submitted['trainer']}"] if kind else []


def _script(
    config: RunConfig,
    role: str,
    options: Sequence[str],
    task: str,
    restarts: int,
    *,
    give_up: str = "",
    show_npus: str = "",
) -> str:
    folder, array = _folder(config), any(option.startswith("--array") for option in options)
    ids = "%A_%a" if array else "%j"
    common = [
        f"--job-name={_job(config, role)}",
        f"--output={folder}/{role}-{ids}.log",
        "--open-mode=append",
        "--requeue",
    ]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in [*common, *options]),
        setup=config.launch.slurm.setup or ":",
        config=shlex.quote(str(_run_dir(config) / "config.yaml")),
        folder=shlex.quote(str(folder)),
        name="rollout-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID" if array else role,
        task=shlex.quote(make_stoppable(task)),
        stopped=EXIT_STOPPED,
        fault=EXIT_CONFIG,
        restarts=restarts,
        give_up=give_up,
        show_npus=show_npus,
    )


def _slurm(*argv: str) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, timeout=_SUBMIT_S, check=False)
    if result.returncode:
        raise ConfigError(
            f"{shlex.join(argv)} refused: {result.stderr.strip()}. Set options of your site (partition, account, time) "
            "in launch.slurm.trainer, rollout and report"
        )
    return result.stdout


def _run_dir(config: RunConfig) -> Path:
    return config.run_dir.absolute()


def _folder(config: RunConfig) -> Path:
    """Return the folder of batch scripts, logs, and failure counts of the jobs."""
    return _run_dir(config) / "slurm"


def _job(config: RunConfig, role: str) -> str:
    """Return the name of a job.

    It contains a digest of the run's folder. A trainer that gives up cancels its servers by name, and must not cancel
    those of a run with the same name in another folder.
    """
    return f"{config.name_with_digest}-{role}"
