"""`async-grpo launch`: hands a run to the scheduler of a cluster."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from async_grpo.app.cli.common import ConfigFile, Override, Steps, exit_with_code, print_line

app = typer.Typer(help="Hand a run to the scheduler of a cluster.", no_args_is_help=True)
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; submit and write nothing.")]


@app.callback()
def common() -> None:
    """Hand a run to the scheduler of a cluster, which places its roles and starts them again."""


@app.command()
@exit_with_code()
def slurm(
    config: ConfigFile,
    override: Override = None,
    steps: Steps = None,
    servers: Annotated[
        int | None,
        typer.Option("--servers", min=1, metavar="N", help="Servers to start; with a trainer there, servers to add."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Submit a run as jobs of Slurm: the trainer, an array of rollout servers, and the report.

    It needs redis.url, and a runs_dir that all nodes share. Preempted roles save their work and are requeued; the same
    command resumes a run that has ended before its last step, and --servers N adds servers to one that is running.
    """
    from async_grpo.app.launch.clusters.slurm import dependency_options, make_job_scripts, submit_run
    from async_grpo.app.launch.plan import plan_run

    run = plan_run(config, override or [], download=not dry_run, steps=steps).config
    if not dry_run:
        submit_run(run, servers, print_line)
        return
    for role, script in make_job_scripts(run, servers or run.rollout.servers).items():
        options = " ".join(dependency_options(role, {"trainer": "TRAINER_JOB"}))
        typer.echo(f"# sbatch --parsable {options} {run.run_dir}/slurm/{role}.sbatch\n{script}")


@app.command()
@exit_with_code()
def ray(
    config: ConfigFile,
    override: Override = None,
    steps: Steps = None,
    servers: Annotated[
        int | None,
        typer.Option(
            "--servers", min=0, metavar="N", help="Servers to start; with a trainer there, servers to add. 0: none."
        ),
    ] = None,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="Stop this rollout server, and do nothing else.")
    ] = None,
    dry_run: DryRun = False,
) -> int:
    """Run as actors of a Ray cluster (launch.ray.address or RAY_ADDRESS), and stay until the end.

    It needs redis.url, and a runs_dir that all nodes share. Roles of lost nodes are started elsewhere, those of drained
    nodes save their work first; the same command resumes. Ctrl-C stops what this command has started.
    """
    from async_grpo.app.launch.clusters.ray import launch_run, plan_bundles, remove_server
    from async_grpo.app.launch.plan import plan_run

    run = plan_run(config, override or [], download=not dry_run, steps=steps).config
    if dry_run:
        for role, bundles in plan_bundles(run, run.rollout.servers if servers is None else servers).items():
            typer.echo(f"{role}: {json.dumps(bundles)}")
    elif remove is not None:
        remove_server(run, remove)
    else:
        return launch_run(run, servers, print_line)
    return 0


@app.command()
@exit_with_code()
def kubernetes(config: ConfigFile, override: Override = None, steps: Steps = None, dry_run: DryRun = False) -> None:
    """Apply a run to the cluster of kubectl: JobSet, Deployment, Redis, report, budgets, policies, autoscaler.

    Addresses and runs_dir are set for the cluster; models, data and the Secret with the passwords must be there.
    """
    from async_grpo.app.launch.clusters.kubernetes import apply_objects, dump_objects, resolve_for_cluster

    run = resolve_for_cluster(config, override or [], steps)
    typer.echo(dump_objects(run) if dry_run else apply_objects(run))
