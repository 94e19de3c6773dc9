"""report.md: the result of a run on one page, with plots, evaluations, counters, samples and how to reproduce it.

metrics.jsonl, samples/*.jsonl, config.yaml, run.json, summary --> summary.json, plots/*.png, report.md
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_grpo.app.report.plots import write_plots
from async_grpo.app.report.summary import score_format
from async_grpo.evaluation.summary import (
    INTERVALS,
    describe_failed,
    describe_unextracted,
    estimates_by_name,
    format_estimate,
)
from async_grpo.telemetry.charts import STEP_TIME
from async_grpo.telemetry.jsonl import iter_rows, read_rows
from async_grpo.telemetry.rows import Facts, Row, rows_of_kind
from async_grpo.utils.files import write_atomic
from async_grpo.utils.text import fenced, figure
from async_grpo.wire.board import EvalMetrics
from async_grpo.wire.records import ReleaseReason

_GROUPS = 2
"""Number of groups shown from the beginning, and from the end, of a run."""
_HEAD_START = (
    ": the first S + 1, or half of a short run, are left out of all rates and shares, because they train what was "
    "generated while the trainer waited for its first batch"
)
_NOT_IN_STEPS = (
    "The wall time begins when the processes start and ends before this report. Until the first batch, engines start "
    "and the first policy is evaluated; the rest is the last evaluation, the stop, and steps repeated after a restart. "
    "It contains neither `async-grpo prepare` nor the making of the first policy, whose time is stated even if it is "
    "cached now."
)
_HOW = "Sampled at temperature 1 by one pinned version each. See docs/evaluation.md."


def evaluations_section(evaluations: Sequence[Row]) -> str:
    """Markdown: a table of the measured versions, one of the sources of the last version, and why figures are missing.

    Returns "" if no version has figures.
    """
    measured = [row for row in evaluations if row.get("figures")]
    if not measured:
        return ""
    last = measured[-1]
    parts = [
        "## Held-out prompts",
        _table("version", ((str(row.get("version")), row["figures"]) for row in measured), _samples(last)),
        _by_source(last),
        f"{INTERVALS}. {_HOW}{_remarks(last)}",
    ]
    return "\n\n".join(part for part in parts if part)


def _by_source(row: Row) -> str:
    sources = row.get("by_source") or {}
    if not sources:
        return ""
    table = _table("source", ((_cell(source), figures) for source, figures in sources.items()), _samples(row))
    return f"Of version {row.get('version')}, by source of the prompts:\n\n{table}"


def _table(key: str, rows: Iterable[tuple[str, Row]], samples: int) -> str:
    found = [(name, msgspec.convert(row, EvalMetrics)) for name, row in rows]
    estimates = [estimates_by_name(figures, samples) for _, figures in found]
    names = list(dict.fromkeys(name for row in estimates for name in row))
    lines = [f"| {' | '.join([key, 'prompts', *names])} |", f"|{'---|' * (len(names) + 2)}"]
    for (label, figures), row in zip(found, estimates, strict=True):
        lines.append(
            f"| {' | '.join([label, str(figures.prompts), *(format_estimate(row.get(name)) for name in names)])} |"
        )
    return "\n".join(lines)


def _remarks(row: Row) -> str:
    reason, unjudged = row.get("no_majority"), row["figures"].get("unjudged")
    remarks = f" No maj@{_samples(row)}: {_cell(str(reason), characters=400)}." if reason else ""
    remarks += f" {unjudged} completions could not be judged and are left out." if unjudged else ""
    if failed := row["figures"].get("failed"):
        remarks += f" {describe_failed(failed)}; `logs/` has why."
    unextracted = row["figures"].get("unextracted")
    return remarks + (f" {describe_unextracted(unextracted, _samples(row))}; `logs/` has why." if unextracted else "")


def _samples(row: Row) -> int:
    return int(row.get("samples") or 1)


def _cell(text: str, *, characters: int = 80) -> str:
    """Text from data or configuration as code, without characters that Markdown would interpret."""
    shown = "".join(c if c.isprintable() and c not in "`|" else "?" for c in text.replace("`", "'"))
    if len(shown) > characters:
        shown = shown[: characters - 3] + "..."
    return f"`{shown}`"


def samples_section(run_dir: Path) -> str:
    """Markdown: a few groups from the beginning and the end of the run; "" without samples.

    Model output stands in blocks that it cannot close.
    """
    early, late = _ends_of(run_dir)
    if not early:
        return ""
    blocks = ["## Samples", "### Early in training", *map(_group, early)]
    if late:
        blocks += ["### Late in training", *map(_group, late)]
    return "\n\n".join(blocks)


def _ends_of(run_dir: Path) -> tuple[list[Row], list[Row]]:
    """The first and the last groups by version. Only these are kept in memory: sample files may be larger than it."""
    first: list[tuple[int, int, Row]] = []
    last: list[tuple[int, int, Row]] = []
    rows = (row for path in sorted((run_dir / "samples").glob("*.jsonl")) for row in iter_rows(path))
    for place, row in enumerate(row for row in rows if _completions(row)):
        first = sorted([*first, (_version(row), place, row)])
        if len(first) > _GROUPS:
            last = sorted([*last, first.pop()])[-_GROUPS:]
    return [row for *_, row in first], [row for *_, row in last]


def _group(row: Row) -> str:
    """Markdown: the prompt, the reference answer, and the best and the worst completion."""
    ranked = sorted(_completions(row), key=lambda completion: -(completion.get("reward") or 0.0))
    shown = ranked if len(ranked) <= 2 else [ranked[0], ranked[-1]]
    blocks = [f"Prompt (policy version {_version(row)}):", fenced(str(row.get("prompt", "")))]
    if answer := str(row.get("answer") or ""):
        blocks += ["Reference answer:", fenced(answer)]
    for completion in shown:
        blocks += [_caption(completion), fenced(str(completion.get("text", "")))]
    return "\n\n".join(blocks)


def _caption(completion: Row) -> str:
    """The reward of a completion and the policy versions that wrote it."""
    reward = completion.get("reward")
    judged = "not judged" if reward is None else f"{reward:g}"
    spans = completion.get("spans") or []
    written = ", ".join(f"tokens {start} to {end} by version {version}" for version, start, end in spans[:4])
    return f"Reward {judged}" + (f" ({written}):" if written else ":")


def _version(row: Row) -> int:
    """The oldest policy version that wrote a token of the group."""
    spans = [span for completion in _completions(row) for span in completion.get("spans") or []]
    return min((span[0] for span in spans), default=0)


def _completions(row: Row) -> list[dict[str, Any]]:
    completions = row.get("completions")
    return [c for c in completions if isinstance(c, dict)] if isinstance(completions, list) else []


def write_report(run_dir: Path, summary: Facts) -> Path:
    """Write summary.json, plots/*.png and report.md from the files of a run; returns the path of report.md.

    `summary` is what `summary.summarize` returns. A section whose files are missing is left out.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    servers = [read_rows(path) for path in sorted((run_dir / "timeline").glob("rollout-*.jsonl"))]
    plots = write_plots(run_dir, rows_of_kind(rows, "step"), summary, servers)
    write_atomic(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    sections = [
        f"# {summary.get('name', run_dir.name)}",
        _headline(summary),
        *[f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in plots],
        evaluations_section(summary.get("evaluations") or []),
        _balance(summary),
        _bound(summary),
        _decisions(rows_of_kind(rows, "staleness")),
        _gap(summary),
        _time(summary),
        _given_up(summary),
        _engine_notes(summary),
        _weight_updates(summary),
        _warnings(rows_of_kind(rows, "warning")),
        samples_section(run_dir),
        _reproduce(run_dir, summary),
        _timeline(run_dir),
    ]
    return write_atomic(run_dir / "report.md", "\n\n".join(section for section in sections if section) + "\n")


def _headline(summary: Facts) -> str:
    """The table at the top: results, cost and the checks of the run."""
    score = summary.get("held_out_score", "accuracy")
    form, learned = score_format(score), {}
    for kind, key in (("sampled", "accuracy"), ("greedy", "greedy_accuracy")):
        if summary.get(f"{key}_before") is not None:
            learned[f"held-out {score}, {kind}"] = _change(summary, f"{key}_before", f"{key}_after", form)
    learned["training reward, first and last tenth"] = _change(summary, "reward_first", "reward_last", ".3f")
    first = next(iter(learned))
    lines = {
        f"**{first}**": f"**{learned.pop(first)}**",
        **learned,
        "optimizer steps": _figure(summary, "steps", ","),
        "tokens trained per second of the steps": _figure(summary, "tokens_per_s", ",.0f"),
        "tokens trained, and generated": f"{_figure(summary, 'trained_tokens', ',')}, {_generated(summary)}",
        "wall time": _wall(summary),
        "idle: trainer, and rollout servers": f"{_figure(summary, 'trainer_idle', '.0%')}, "
        f"{_figure(summary, 'rollout_idle', '.0%')}",
        "age of trained tokens": f"max {_figure(summary, 'max_age', '')}, bound {_figure(summary, 'age_bound', '')}",
        "log-probability gap, mean": _figure(summary, "logprob_gap_mean", ".2e"),
        "completions that could not be judged": _counts(summary, "reward_failures"),
        "restarts": _counts(summary, "restarts"),
    }
    return "\n".join(["| | |", "|---|---|", *[f"| {name} | {value} |" for name, value in lines.items()]])


def _generated(summary: Facts) -> str:
    return f"{_figure(summary, 'generated_tokens', ',')} ({_figure(summary, 'generated_tokens_per_s', ',.0f')}/s)"


def _wall(summary: Facts) -> str:
    """The wall time and its parts. The time to prepare the first policy is stated separately, because it is not
    included."""
    wall_s, start_s, steps_s = (summary.get(key) or 0.0 for key in ("wall_s", "start_s", "steps_s"))
    rest_s = max(0.0, wall_s - start_s - steps_s)
    parts = f"{start_s:,.0f} s until the first batch, {steps_s:,.0f} s of steps, {rest_s:,.0f} s of the rest"
    prepared_s = summary.get("prepare_s")
    before = "" if prepared_s is None else f"; before that, the first policy took {prepared_s:,.0f} s"
    return f"{wall_s:,.0f} s ({parts}){before}"


def _counts(summary: Facts, key: str) -> str:
    """The names in a dictionary of counts, each with its count if that is not 0; "none" without any."""
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


def _decisions(rows: list[Row]) -> str:
    """When another S came into force, and why."""
    if not rows:
        return ""
    columns = ("step", "staleness_before", "staleness", "reason")
    said = ["| " + " | ".join(str(row.get(column)) for column in columns) + " |" for row in rows]
    head = ["### Decisions of max_staleness: auto", "", "| after step | S before | S | because |", "|---|---|---|---|"]
    return "\n".join([*head, *said])


def _gap(summary: Facts) -> str:
    if summary.get("logprob_gap_mean") is None:
        return (
            "## Log-probability gap\n\n"
            "Not measured: no step trained a completion of its own version, and no probe came."
        )
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
    meanings = {series.label: series.doc for series in STEP_TIME.series}
    shares = sorted(split.items(), key=lambda part: -part[1])
    lines = [
        f"| {name} | {spent_s:,.1f} | {spent_s / total:.0%} | {meanings.get(name, '')} |"
        for name, spent_s in shares
        if spent_s > 0
    ]
    header = "| part of the step | seconds | share | |\n|---|---:|---:|---|"
    note = _HEAD_START if (summary.get("first_timed_step") or 1) > 1 else ""
    from_to = f"Steps {summary.get('first_timed_step') or 1} to {summary.get('steps')}{note}."
    said = f"## Where the time went\n\n{summary.get('bottleneck') or ''}\n\n{from_to}\n"
    return "\n".join([said, header, *lines, "", _NOT_IN_STEPS])


def _given_up(summary: Facts) -> str:
    """The rollout servers without which the run went on, and why."""
    reasons = (summary.get("given_up") or {}).values()
    if not reasons:
        return ""
    shown = fenced("\n".join(map(str, reasons)), limit=4000)
    return f"## Rollout servers that were given up\n\nThe run went on without them:\n\n{shown}"


def _engine_notes(summary: Facts) -> str:
    """Why engines did not run as configured."""
    notes = (summary.get("engine_notes") or {}).values()
    if not notes:
        return ""
    shown = fenced("\n".join(map(str, notes)), limit=4000)
    return f"## Engines that did not run as configured\n\n{shown}"


def _weight_updates(summary: Facts) -> str:
    """The medians of the seconds that updates took. A run of an older release states none."""
    found = summary.get("weight_updates") or {}
    if found.get("pause_s") is None:
        return ""
    lines = [
        f"| transfer | {_figure(found, 'transfer_s', '.3f')} | from the manifest until everything was received; "
        "nobody waits |",
        f"| pause | {_figure(found, 'pause_s', '.3f')} | the engine stands still |",
        f"| load | {_figure(found, 'load_s', '.3f')} | the part of the pause in which weights are copied |",
    ]
    return "\n".join(
        [
            "## Weight updates",
            "",
            f"Medians of {found['updates']:,} updates of all servers, in seconds.",
            "",
            "| part | median | |",
            "|---|---:|---|",
            *lines,
        ]
    )


def _warnings(warnings: list[Row]) -> str:
    if not warnings:
        return ""
    messages = [str(row.get("message", "")) for row in warnings]
    shown = fenced("\n".join(messages[:20]), limit=4000)
    return f"## Warnings\n\n{len(warnings)} in metrics.jsonl, the first of them:\n\n{shown}"


def _reproduce(run_dir: Path, summary: Facts) -> str:
    name = summary.get("name", run_dir.name)
    state, config = run_dir / "run.json", run_dir / "config.yaml"
    typed = json.loads(state.read_text(encoding="utf-8")).get("command") if state.exists() else None
    command = typed or f"async-grpo run {run_dir}/config.yaml -o name={name}-again"
    text = f"## Reproduce\n\nSeed {_figure(summary, 'seed', '')}.\n\n{fenced(command)}"
    if not config.exists():
        return text
    resolved = fenced(config.read_text(encoding="utf-8").rstrip(), limit=20_000)
    return f"{text}\n\n<details><summary>resolved configuration (config.yaml)</summary>\n\n{resolved}\n\n</details>"


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
    return figure(summary.get(key), form)
