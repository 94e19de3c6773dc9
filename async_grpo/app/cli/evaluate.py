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
    print_message,
    progress_bar,
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
SaveFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write all completions to this file, as JSON lines.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file, as JSON.")
]
Patience = Annotated[
    float | None,
    typer.Option(
        "--patience",
        min=1.0,
        metavar="SECONDS",
        help="Maximum seconds per completion or grade (default: eval.timeout_s).",
    ),
]

_WIDTH = 200
"""Width of a table that is not printed to a terminal, with room for all sources."""


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
    """Measure how often a policy solves the held-out prompts of its run, with 95% intervals.

    The scores are mean@k, pass@k, maj@k and greedy.

    Prompts, seeds, rewards and engine settings are those of the run, so the last checkpoint reproduces the accuracy in
    the run's report. With --live, the weights may change during the evaluation. The output then lists the policy
    versions of the answers.
    """
    from async_grpo.lab.evaluate.evaluate import make_eval_plan

    for file in (save, json_file):
        if file is not None and file.exists():
            raise ConfigError(f"{file} already exists and would be overwritten. Name another file")
    run_config, policy = PolicyOptions(config, override, run_dir, checkpoint, live).resolve_policy()
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

        def count_answer(total: int) -> None:
            progress.update(bar, advance=1, total=total)

        return await grade(
            config, policy, plan, patience_s=patience_s, report_progress=print_message, on_answer=count_answer
        )


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

    grades = report.grades
    plan = report.plan
    metrics_by_source = {"all": grades.metrics, **grades.by_source}
    table = Table("")
    for source in metrics_by_source:
        table.add_column(escape(clean_text(source)), justify="right")
    table.add_row("prompts", *(str(metrics.prompts) for metrics in metrics_by_source.values()))

    columns = [estimates_by_name(metrics, plan.samples) for metrics in metrics_by_source.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    for name in names:
        cells = [format_estimate(column.get(name)) for column in columns]
        table.add_row(name, *cells, style="bold" if "mean" in name else "")

    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    console.print(escape(_title(report)), highlight=False, soft_wrap=True)
    console.print(table)
    for line in [f"{INTERVALS}.", *_remarks(report)]:
        console.print(escape(line), highlight=False, soft_wrap=True)


def _title(report: EvalReport) -> str:
    from async_grpo.lab.evaluate.policy_source import LiveRun

    plan = report.plan
    name = report.config.name
    settings = f"temperature {plan.temperature:g}, seed {report.config.seed}, {report.wall_s:.0f} s"
    if isinstance(report.policy, LiveRun):
        return f"{name}, live ({', '.join(report.policy.servers)}): {settings}"
    version = "" if report.policy.version is None else f", version {report.policy.version}"
    return f"{name}, {report.policy.path}{version}: {settings}"


def _remarks(report: EvalReport) -> list[str]:
    from async_grpo.evaluation.summary import describe_failed, describe_unextracted
    from async_grpo.lab.evaluate.policy_source import LiveRun

    grades = report.grades
    lines: list[str] = []
    if grades.no_majority:
        lines.append(f"No maj@{report.plan.samples}: {grades.no_majority}.")
    if grades.metrics.unjudged:
        lines.append(f"{grades.metrics.unjudged} completions could not be judged and are left out.")
    if grades.failures:
        lines.append(f"{describe_failed(len(grades.failures))} (first {clean_text(grades.failures[0])}).")
    failures = grades.extraction_failures
    if failures:
        counts = Counter(failure.kind for failure in failures)
        kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
        reasons = clean_text(f"{kinds}; first {failures[0].reason}")
        lines.append(f"{describe_unextracted(len(failures), report.plan.samples)} ({reasons}).")
    if report.trained_on:
        lines.append(f"{report.trained_on} of the requested prompts were left out, because the run trains on them.")
    held_out = len(grades.prompts) + report.trained_on
    if held_out < report.plan.prompts:
        lines.append(f"The data have {held_out} held-out prompts, fewer than the {report.plan.prompts} requested.")
    if isinstance(report.policy, LiveRun):
        lines.append(_describe_versions(report.versions))
    return lines + _compare_with_report(report)


def _describe_versions(versions: dict[int, int]) -> str:
    if len(versions) == 1:
        return f"One policy version wrote all answers: {next(iter(versions))}."
    total = sum(versions.values()) or 1
    shares = ", ".join(f"{version} ({tokens / total:.0%} of the tokens)" for version, tokens in versions.items())
    return f"Policy versions that wrote the answers: {shares}. The results describe this mixture."


def _compare_with_report(report: EvalReport) -> list[str]:
    """Compare the accuracies with those in the run's own report, if it has any."""
    if report.agrees is None:
        return []
    stated = _accuracies(report.stated["sampled_accuracy"], report.stated["greedy_accuracy"])
    if report.agrees:
        return [f"The accuracies equal those in the run's report: {stated}."]
    measured = _accuracies(report.grades.sampled_accuracy, report.grades.greedy_accuracy)
    return [
        f"Measured {measured}; the run's report has {stated}. Different batches round differently, which can change "
        "single tokens (docs/evaluation.md)"
    ]


def _accuracies(sampled: float | None, greedy: float | None) -> str:
    return f"{figure(sampled, '.6g')} sampled, {figure(greedy, '.6g')} greedy"
