"""`async-grpo doctor`: what is installed, what is missing, what to type."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_grpo.doctor.checks import examine
from async_grpo.doctor.finding import Finding

MARKS = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]optional[/]"}


class PlatformChoice(StrEnum):
    """What the trainer computes on."""

    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


def report(platform: PlatformChoice, *, as_json: bool) -> int:
    """Print the findings; the exit code: 1 if something that is needed is missing."""
    findings = examine(platform.value)
    healthy = all(finding.ok is not False for finding in findings)
    if as_json:
        document = {"platform": platform.value, "ok": healthy, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    else:
        Console().print(_table(platform, findings))
    return 0 if healthy else 1


def _table(platform: PlatformChoice, findings: list[Finding]) -> Table:
    table = Table(title=f"async-grpo doctor (platform: {platform.value})", show_lines=False)
    for column in ("", "what", "found", "what to type"):
        table.add_column(column)
    for finding in findings:
        fix = "" if finding.ok else finding.fix
        table.add_row(MARKS[finding.ok], finding.name, escape(finding.found), escape(fix))
    return table
