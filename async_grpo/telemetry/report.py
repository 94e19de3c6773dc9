"""The end of a run on one page: report.md, with plots, counters, samples and how to reproduce it.

metrics.jsonl, samples/*.jsonl, config.yaml, run.json, summary --> summary.json, plots/*.png, report.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_grpo.telemetry.escape import fenced
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.plots import write_plots
from async_grpo.telemetry.report_evaluations import evaluations_section
from async_grpo.telemetry.report_samples import samples_section
from async_grpo.telemetry.rows import Row, of_kind
from async_grpo.wire.records import ReleaseReason

Facts = dict[str, Any]

_PART_MEANINGS = {
    "wait": "the trainer waited for a batch from the rollout servers",
    "pack": "packing sequences into micro-batches",
    "train": "forward and backward",
    "optimizer": "optimizer step",
    "publish": "snapshot and announcement of the new weights",
    "checkpoint": "writing checkpoints",
    "other": "everything else in a step",
}


def write_report(run_dir: Path, summary: Facts) -> Path:
    """summary.json, plots/*.png and report.md from what the run left behind; returns report.md.

    `summary` is what `summary.summarize` returns. Missing files leave out their section.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    plots = write_plots(run_dir, of_kind(rows, "step"), summary)
    _write(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    sections = [
        f"# {summary.get('name', run_dir.name)}",
        _headline(summary),
        *[f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in plots],
        evaluations_section(summary.get("evaluations") or []),
        _balance(summary),
        _bound(summary),
        _gap(summary),
        _time(summary),
        _warnings(of_kind(rows, "warning")),
        samples_section(run_dir),
        _reproduce(run_dir, summary),
        _timeline(run_dir),
    ]
    return _write(run_dir / "report.md", "\n\n".join(section for section in sections if section) + "\n")


def _write(path: Path, text: str) -> Path:
    """Whole or not at all."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    return draft.replace(path)


def _headline(summary: Facts) -> str:
    accuracy = _change(summary, "accuracy_before", "accuracy_after", ".1%")
    greedy = _change(summary, "greedy_accuracy_before", "greedy_accuracy_after", ".1%")
    restarts, failures = _counts(summary, "restarts"), _counts(summary, "reward_failures")
    lines = [
        ("**held-out accuracy, sampled**", f"**{accuracy}**"),
        ("held-out accuracy, greedy", greedy),
        ("training reward, first and last tenth", _change(summary, "reward_first", "reward_last", ".3f")),
        ("optimizer steps", _figure(summary, "steps", ",")),
        ("wall time", f"{_figure(summary, 'wall_s', ',.0f')} s"),
        (
            "tokens generated",
            f"{_figure(summary, 'generated_tokens', ',')} ({_figure(summary, 'tokens_per_s', ',.0f')}/s)",
        ),
        (
            "tokens trained",
            f"{_figure(summary, 'trained_tokens', ',')} ({_figure(summary, 'trained_tokens_per_s', ',.0f')}/s)",
        ),
        (
            "age of trained tokens",
            f"max {_figure(summary, 'max_age', '')}, bound {_figure(summary, 'age_bound', '')}",
        ),
        ("log-probability gap, mean", _figure(summary, "logprob_gap_mean", ".2e")),
        ("completions that could not be judged", failures),
        ("restarts", restarts),
    ]
    return "\n".join(["| | |", "|---|---|", *[f"| {name} | {value} |" for name, value in lines]])


def _counts(summary: Facts, key: str) -> str:
    """Names with their counts, those with none left out."""
    return ", ".join(f"{name} {count}" for name, count in (summary.get(key) or {}).items() if count) or "none"


def _balance(summary: Facts) -> str:
    groups = summary.get("groups") or {}
    if not groups.get("admitted"):
        return ""
    terms = [f"{groups.get(reason.value, 0):,} {reason.value}" for reason in ReleaseReason]
    verdict = "holds" if summary.get("balanced") else "**DOES NOT HOLD**"
    return (
        "## Every group accounted for\n\n"
        "`admitted = released + active`, with active = in flight + ready + taken:\n\n"
        f"> {groups['admitted']:,} admitted = {' + '.join(terms)} + {groups.get('active', 0):,} active\n\n"
        f"The equation {verdict}."
    )


def _bound(summary: Facts) -> str:
    oldest, bound = summary.get("max_age"), summary.get("age_bound")
    if oldest is None or bound is None:
        return ""
    verdict = "kept" if oldest <= bound else "**BROKEN**"
    return (
        "## Staleness\n\n"
        f"S = {_figure(summary, 'max_staleness', '')}; max age <= bound: {oldest} <= {bound}, {verdict}. "
        f"Mean age over the trained tokens: {_figure(summary, 'mean_age', '.2f')} optimizer steps."
    )


def _gap(summary: Facts) -> str:
    if summary.get("logprob_gap_mean") is None:
        return ""
    return (
        "## Log-probability gap\n\n"
        "Absolute difference between engine and trainer, for the same tokens under the same weights: mean "
        f"{_figure(summary, 'logprob_gap_mean', '.2e')}, max {_figure(summary, 'logprob_gap_max', '.2e')} "
        f"over {_figure(summary, 'gap_tokens', ',')} tokens (those that one version sampled whole)."
    )


def _time(summary: Facts) -> str:
    split = summary.get("time_split_s") or {}
    total = sum(split.values())
    if not total:
        return ""
    shares = sorted(split.items(), key=lambda part: -part[1])
    lines = [
        f"| {name} | {spent_s:,.1f} | {spent_s / total:.0%} | {_PART_MEANINGS.get(name, '')} |"
        for name, spent_s in shares
        if spent_s > 0
    ]
    header = "| part of the step | seconds | share | |\n|---|---:|---:|---|"
    return f"## Where the time went\n\n{_who_waited(split.get('wait', 0.0) / total)}\n\n" + "\n".join([header, *lines])


def _who_waited(share: float) -> str:
    """In words, from the share of its time that the trainer spent waiting."""
    if share >= 0.2:
        reading = "generation was the bottleneck: more rollout servers would make the run faster"
    elif share >= 0.05:
        reading = "generation and training were about balanced"
    else:
        reading = "training was the bottleneck: rollout servers waited for the staleness window"
    return f"The trainer waited for rollouts {share:.0%} of its time; {reading}."


def _warnings(warnings: list[Row]) -> str:
    if not warnings:
        return ""
    messages = [str(row.get("message", "")) for row in warnings]
    shown = fenced("\n".join(messages[:20]), limit=4000)
    return f"## Warnings\n\n{len(warnings)} in metrics.jsonl, the first of them:\n\n{shown}"


def _reproduce(run_dir: Path, summary: Facts) -> str:
    name = summary.get("name", run_dir.name)
    command = _first_command(run_dir) or f"async-grpo run {run_dir}/config.yaml -o name={name}-again"
    text = f"## Reproduce\n\nSeed {_figure(summary, 'seed', '')}.\n\n{fenced(command)}"
    config = run_dir / "config.yaml"
    if not config.exists():
        return text
    resolved = fenced(config.read_text(encoding="utf-8").rstrip(), limit=20_000)
    return f"{text}\n\n<details><summary>resolved configuration (config.yaml)</summary>\n\n{resolved}\n\n</details>"


def _first_command(run_dir: Path) -> str:
    """What the user typed, if the supervisor noted it."""
    path = run_dir / "run.json"
    if not path.exists():
        return ""
    return str(json.loads(path.read_text(encoding="utf-8")).get("command") or "")


def _timeline(run_dir: Path) -> str:
    if not (run_dir / "timeline.json").exists():
        return ""
    return (
        "## Timeline\n\n"
        "Open <https://ui.perfetto.dev>, choose *Open trace file* and pick `timeline.json` "
        "(it stays in your browser). One row a track: generation, training, weight updates, waits."
    )


def _change(summary: Facts, before: str, after: str, form: str) -> str:
    return f"{_figure(summary, before, form)} → {_figure(summary, after, form)}"


def _figure(summary: Facts, key: str, form: str) -> str:
    value = summary.get(key)
    return "-" if value is None else format(value, form)
