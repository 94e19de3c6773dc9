"""`async-grpo eval`: evaluate a policy on the held-out prompts of a run."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from async_grpo.app.cli.common import (
    CheckpointPath,
    Live,
    PolicyOptions,
    RunConfigFile,
    RunDir,
    RunOverride,
    exit_with_code,
    progress_bar,
    say,
)
from async_grpo.errors import ConfigError
from async_grpo.utils.text import clean_text, figure

if TYPE_CHECKING:
    from async_grpo.config import RunConfig
    from async_grpo.lab.evaluate.evaluate import EvalReport
    from async_grpo.lab.evaluate.policy_source import Checkpoint, LiveRun
    from rollout_server.evaluation.eval_runner import EvalPlan

Samples = Annotated[
    int | None, typer.Option(min=1, metavar="K", help="Completions per prompt (default: eval.samples).")
]
Prompts = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Number of held-out prompts (default: eval.prompts).")
]
Temperature = Annotated[float | None, typer.Option(help="Temperature of the sampled completions (default: 1).")]
SaveFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every completion as a line of JSON.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")]
Patience = Annotated[
    float | None,
    typer.Option(
        "--patience",
        min=1.0,
        metavar="SECONDS",
        help="Seconds to wait for each completion or grade (default: eval.timeout_s).",
    ),
]

_WIDTH = 200
"""Columns of a table that is written to a file: room for every source."""


@exit_with_code()
def evaluate(
    config: RunConfigFile = None,
    override: RunOverride = None,
    run_dir: RunDir = None,
    checkpoint: CheckpointPath = None,
    live: Live = False,
    samples: Samples = None,
    prompts: Prompts = None,
    temperature: Temperature = None,
    save: SaveFile = None,
    json_file: JsonFile = None,
    patience_s: Patience = None,
) -> None:
    """Evaluate a policy on the held-out prompts of its run: mean@k, pass@k, maj@k and greedy, with 95% intervals.

    Prompts, seeds, rewards and engine settings are those of the run, so the final checkpoint reproduces the accuracy in
    the run's report. With --live the weights may change during the evaluation; the output then says which versions
    wrote the answers.
    """
    from async_grpo.lab.evaluate.evaluate import make_eval_plan

    for file in (save, json_file):
        if file is not None and file.exists():
            raise ConfigError(f"{file} exists already, and nothing is overwritten. Name another file")
    run_config, policy = PolicyOptions(config, override, run_dir, checkpoint, live).policy()
    plan = make_eval_plan(run_config, prompts=prompts, samples=samples, temperature=temperature)
    report = asyncio.run(_with_progress(run_config, policy, plan, patience_s or run_config.eval.timeout_s))
    _write(report, save, json_file)
    _print(report)


async def _with_progress(
    config: RunConfig, policy: Checkpoint | LiveRun, plan: EvalPlan, patience_s: float
) -> EvalReport:
    from async_grpo.lab.evaluate.evaluate import evaluate as grade

    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("completions", total=None)

        def answered(total: int) -> None:
            progress.update(bar, advance=1, total=total)

        return await grade(config, policy, plan, patience_s=patience_s, say=say, on_answer=answered)


def _write(report: EvalReport, save: Path | None, json_file: Path | None) -> None:
    from async_grpo.lab.evaluate.evaluate import completion_rows, report_as_json
    from async_grpo.telemetry.jsonl import JsonLines

    if save is not None:
        with JsonLines(save) as lines:
            for row in completion_rows(report):
                lines.write(row)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report_as_json(report), indent=2) + "\n")


def _print(report: EvalReport) -> None:
    from async_grpo.evaluation.summary import INTERVALS, estimates_by_name, format_estimate

    grades, plan = report.grades, report.plan
    parts = {"all": grades.metrics, **grades.by_source}
    table = Table("")
    for source in parts:
        table.add_column(escape(clean_text(source)), justify="right")
    table.add_row("prompts", *(str(part.prompts) for part in parts.values()))
    columns = [estimates_by_name(part, plan.samples) for part in parts.values()]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(
            name, *(format_estimate(column.get(name)) for column in columns), style="bold" if "mean" in name else ""
        )
    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    console.print(escape(_title(report)), highlight=False, soft_wrap=True)
    console.print(table)
    for line in [f"{INTERVALS}.", *_remarks(report)]:
        console.print(escape(line), highlight=False, soft_wrap=True)


def _title(report: EvalReport) -> str:
    from async_grpo.lab.evaluate.policy_source import LiveRun

    plan, name = report.plan, report.config.name
    how = f"temperature {plan.temperature:g}, seed {report.config.seed}, {report.wall_s:.0f} s"
    if isinstance(report.policy, LiveRun):
        return f"{name}, live ({', '.join(report.policy.servers)}): {how}"
    version = "" if report.policy.version is None else f", version {report.policy.version}"
    return f"{name}, {report.policy.path}{version}: {how}"


def _remarks(report: EvalReport) -> list[str]:
    from async_grpo.evaluation.summary import describe_failed, describe_unextracted
    from async_grpo.lab.evaluate.policy_source import LiveRun

    grades, lines = report.grades, []
    if grades.no_majority:
        lines.append(f"No maj@{report.plan.samples}: {grades.no_majority}.")
    if grades.metrics.unjudged:
        lines.append(f"{grades.metrics.unjudged} completions could not be judged and are left out.")
    if grades.failures:
        lines.append(f"{describe_failed(len(grades.failures))} (first {clean_text(grades.failures[0])}).")
    if failures := grades.extraction_failures:
        kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(one.kind for one in failures).items())
        reasons = clean_text(f"{kinds}; first {failures[0].reason}")
        lines.append(f"{describe_unextracted(len(failures), report.plan.samples)} ({reasons}).")
    if report.trained_on:
        lines.append(f"{report.trained_on} of the requested prompts were left out, because the run trains on them.")
    if (held_out := len(grades.prompts) + report.trained_on) < report.plan.prompts:
        lines.append(f"The data hold out {held_out} prompts, fewer than the {report.plan.prompts} requested.")
    if isinstance(report.policy, LiveRun):
        lines.append(_versions(report.versions))
    return lines + _comparison(report)


def _versions(versions: dict[int, int]) -> str:
    if len(versions) == 1:
        return f"One policy version wrote all answers: {next(iter(versions))}."
    total = sum(versions.values()) or 1
    shares = ", ".join(f"{version} ({tokens / total:.0%} of the tokens)" for version, tokens in versions.items())
    return f"Policy versions that wrote the answers: {shares}. The figures describe this mixture."


def _comparison(report: EvalReport) -> list[str]:
    """Comparison of the accuracies with those of the run's own report, if it states any."""
    if report.agrees is None:
        return []
    stated = _accuracies(report.stated["sampled_accuracy"], report.stated["greedy_accuracy"])
    if report.agrees:
        return [f"Exactly what the run's report states: {stated}."]
    measured = _accuracies(report.grades.sampled_accuracy, report.grades.greedy_accuracy)
    return [
        f"Measured {measured}; the run's report states {stated}. Other batches round differently, which may change "
        "single tokens: see docs/evaluation.md"
    ]


def _accuracies(sampled: float | None, greedy: float | None) -> str:
    return f"{figure(sampled, '.6g')} sampled, {figure(greedy, '.6g')} greedy"
