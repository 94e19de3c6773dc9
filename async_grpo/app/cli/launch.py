"""`async-grpo launch`: submit a run to the scheduler of a cluster."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from async_grpo.app.cli.common import ConfigFile, Override, Steps, exit_with_code, print_line

app = typer.Typer(help="Submit a run to Slurm, Ray or Kubernetes.", no_args_is_help=True)
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the jobs or objects without submitting or writing anything.")
]


@app.callback()
def common() -> None:
    """Submit a run to the scheduler of a cluster, which places its roles and restarts them."""


@app.command()
@exit_with_code()
def slurm(
    config: ConfigFile,
    override: Override = None,
    steps: Steps = None,
    servers: Annotated[
        int | None,
        typer.Option("--servers", min=1, metavar="N", help="Rollout servers to start; for a live run, servers to add."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Submit a run as Slurm jobs: the trainer, an array of rollout servers, and the report.

    Needs redis.url, and a runs_dir on a file system that all nodes share. Preempted roles save their work and are
    requeued. The same command resumes a run that ended before its last step. For a live run, --servers N adds servers.
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
            "--servers", min=0, metavar="N", help="Rollout servers to start; for a live run, servers to add. 0: none."
        ),
    ] = None,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="Only stop this rollout server.")
    ] = None,
    dry_run: DryRun = False,
) -> int:
    """Start a run on a Ray cluster, and wait until it ends.

    The roles are actors of the cluster at launch.ray.address or RAY_ADDRESS. Needs redis.url, and a runs_dir on a file
    system that all nodes share. Roles of lost nodes are restarted on other nodes; roles of drained nodes save their
    work first. The same command resumes. Ctrl-C stops the roles that this command started.
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
    """Create the objects of a run in kubectl's current cluster.

    They are a JobSet, a Deployment, Redis, the report, disruption budgets, network policies and an autoscaler.
    Addresses and runs_dir are set for the cluster. Models, data and the Secret with the passwords must already exist.
    """
    from async_grpo.app.launch.clusters.kubernetes import apply_objects, dump_objects, resolve_for_cluster

    run = resolve_for_cluster(config, override or [], steps)
    typer.echo(dump_objects(run) if dry_run else apply_objects(run))
