"""`async-grpo doctor`: check the installation, and whether a run can start on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_grpo.app.cli.common import OptionalConfigFile, Override, exit_with_code
from async_grpo.app.launch.plan import load_run_config
from async_grpo.config import RunConfig
from async_grpo.config.trainer import PlatformName
from async_grpo.errors import ConfigError
from async_grpo.utils.requirements import Finding

MARKS = {True: "[green]ok[/]", False: "[red]fails[/]", None: "[yellow]note[/]"}


@exit_with_code()
def doctor(
    config: OptionalConfigFile = None,
    override: Override = None,
    platform: Annotated[
        PlatformName | None,
        typer.Option(help="Platform of the trainer and the engine (default: that of CONFIG, else cpu)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check this machine, and list what is missing and how to install it.

    The exit code is 1 if a requirement is missing.

    With CONFIG, also check whether that run can start on this machine: model, data and its first row, reward functions,
    memory, disk, ports, devices, Redis, and keys without effect.
    """
    from async_grpo.lab.doctor import machine_checks, run_checks

    run_config: RunConfig | None = None
    findings: list[Finding] = []
    if config is not None:
        run_config, findings = _read_config(config, override or [])
    chosen: PlatformName = platform or (run_config.trainer.platform if run_config is not None else "cpu")

    with Console(stderr=True).status("checking; undocumented names of packages take ten seconds"):
        findings += [check() for check in machine_checks(chosen)]
        if run_config is not None:
            findings += [check() for check in run_checks(run_config)]
    healthy = all(finding.ok is not False for finding in findings)
    if as_json:
        document = {"platform": chosen, "ok": healthy, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    else:
        _print_findings(findings, f"async-grpo doctor (platform: {chosen})")
    return 0 if healthy else 1


def _read_config(file: Path, overrides: list[str]) -> tuple[RunConfig | None, list[Finding]]:
    """Return the configuration, or None and a finding with the reason why it is invalid."""
    try:
        return load_run_config(file, overrides), []
    except ConfigError as error:
        return None, [Finding("Configuration", False, str(error), f"correct {file}, or the overrides")]


def _print_findings(findings: Sequence[Finding], title: str) -> None:
    """Print the findings as a table, and below it every fix in full on a separate line."""
    table = Table("", "check", "result", title=title)
    for finding in findings:
        table.add_row(MARKS[finding.ok], finding.name, escape(finding.found))
    console = Console()
    console.print(table)
    fixes: dict[tuple[bool | None, str], list[str]] = {}
    for finding in findings:
        if not finding.ok and finding.fix:
            fixes.setdefault((finding.ok, finding.fix), []).append(finding.name)
    for (ok, fix), names in fixes.items():
        console.print(f"{MARKS[ok]} {escape(', '.join(names))}:", soft_wrap=True)
        console.print(f"  {fix}", markup=False, highlight=False, soft_wrap=True)
