"""report.md: the verdict on a run in five lines, four plots, and everything else folded below them.

It can be pasted into a review: folded sections are the <details> that GitHub and the page of runs show.

    metrics.jsonl, samples/*.jsonl, config.yaml, run.json, summary --> summary.json, plots/*.png, report.md

Model output and texts from data are untrusted: they are written in fences that they cannot close (`fenced`), or as
inline code without special characters (`_inline_code`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_grpo.app.report.plots import OVERVIEW_PLOTS, write_plots
from async_grpo.app.report.summary import choose_score_format
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
from async_grpo.telemetry.verdict import judge_run, suggest_next_step
from async_grpo.utils.files import write_atomic
from async_grpo.utils.text import fenced, figure
from async_grpo.wire.board import EvalMetrics
from async_grpo.wire.records import ReleaseReason

_SAMPLE_GROUPS = 2
"""Groups shown from the start of a run, and as many from its end."""
_MAX_SPANS = 4
"""Most spans of a completion that its caption lists."""
_MAX_WARNINGS = 20
_MAX_NOTE_CHARACTERS = 4000
"""Characters of warnings and notes, after which they are cut."""
_MAX_CONFIG_CHARACTERS = 20_000
_HEAD_START = (
    ": the first S + 1, or half of a short run, are left out of all rates and shares, because they train groups that "
    "were generated while the trainer waited for its first batch"
)
_NOT_IN_STEPS = (
    "The wall time starts with the processes and ends before this report. Until the first batch, engines start and the "
    "first policy is evaluated. Everything else is the last evaluation, the shutdown, and steps repeated after a "
    "restart. The wall time includes neither `async-grpo prepare` nor the generation of the first policy, whose time "
    "is shown even if it is cached now."
)
_EVALUATION_METHOD = "Sampled at temperature 1 by one pinned version each. See docs/evaluation.md."


def evaluations_section(evaluations: Sequence[Row]) -> str:
    """Return the Markdown of the held-out scores; "" if no version has metrics.

    It has a table of the measured versions, one by source for the last version, and the reasons for missing metrics.
    """
    measured = [row for row in evaluations if row.get("figures")]
    if not measured:
        return ""
    last = measured[-1]
    versions = [(str(row.get("version")), row["figures"]) for row in measured]
    parts = [
        "## Held-out prompts",
        _metrics_table("version", versions, _samples_per_prompt(last)),
        _sources_table(last),
        f"{INTERVALS}. {_EVALUATION_METHOD}{_evaluation_remarks(last)}",
    ]
    return "\n\n".join(part for part in parts if part)


def _sources_table(evaluation: Row) -> str:
    sources = evaluation.get("by_source") or {}
    if not sources:
        return ""
    labelled = [(_inline_code(source), metrics) for source, metrics in sources.items()]
    table = _metrics_table("source", labelled, _samples_per_prompt(evaluation))
    return f"Of version {evaluation.get('version')}, by source of the prompts:\n\n{table}"


def _metrics_table(first_column: str, labelled: Iterable[tuple[str, Row]], samples: int) -> str:
    """Return a table with a row for each (label, metrics), and a column for each estimate that any row has."""
    rows = [(label, msgspec.convert(metrics, EvalMetrics)) for label, metrics in labelled]
    estimates = [estimates_by_name(metrics, samples) for _, metrics in rows]
    names = list(dict.fromkeys(name for row in estimates for name in row))

    lines = [_table_row([first_column, "prompts", *names]), f"|{'---|' * (len(names) + 2)}"]
    for (label, metrics), row in zip(rows, estimates, strict=True):
        lines.append(_table_row([label, str(metrics.prompts), *(format_estimate(row.get(name)) for name in names)]))
    return "\n".join(lines)


def _table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _evaluation_remarks(evaluation: Row) -> str:
    """Return sentences about completions that were not counted and estimates that are missing."""
    metrics = evaluation["figures"]
    samples = _samples_per_prompt(evaluation)
    remarks = ""
    if no_majority := evaluation.get("no_majority"):
        remarks += f" No maj@{samples}: {_inline_code(str(no_majority), max_characters=400)}."
    if unjudged := metrics.get("unjudged"):
        remarks += f" {unjudged} completions could not be judged and are left out."
    if failed := metrics.get("failed"):
        remarks += f" {describe_failed(failed)}; see `logs/` for the reason."
    if unextracted := metrics.get("unextracted"):
        remarks += f" {describe_unextracted(unextracted, samples)}; see `logs/` for the reason."
    return remarks


def _samples_per_prompt(evaluation: Row) -> int:
    return int(evaluation.get("samples") or 1)


def _inline_code(text: str, *, max_characters: int = 80) -> str:
    """Return text from data or configuration as inline code, without characters that Markdown would interpret."""
    text = text.replace("`", "'")
    safe = "".join(c if c.isprintable() and c not in "`|" else "?" for c in text)
    if len(safe) > max_characters:
        safe = safe[: max_characters - 3] + "..."
    return f"`{safe}`"


def samples_section(run_dir: Path) -> str:
    """Return the Markdown of a few groups from the start and the end of the run; "" without samples."""
    early, late = _first_and_last_groups(run_dir)
    if not early:
        return ""
    blocks = ["## Samples", "### Early in training", *map(_format_group, early)]
    if late:
        blocks += ["### Late in training", *map(_format_group, late)]
    return "\n\n".join(blocks)


def _first_and_last_groups(run_dir: Path) -> tuple[list[Row], list[Row]]:
    """Return the first and the last groups by version. Holds only these, because sample files may exceed the memory."""
    # The index breaks ties, because rows cannot be compared.
    first: list[tuple[int, int, Row]] = []
    last: list[tuple[int, int, Row]] = []
    rows = (row for path in sorted((run_dir / "samples").glob("*.jsonl")) for row in iter_rows(path))
    for index, row in enumerate(row for row in rows if _completions(row)):
        first = sorted([*first, (_oldest_version(row), index, row)])
        if len(first) > _SAMPLE_GROUPS:
            last = sorted([*last, first.pop()])[-_SAMPLE_GROUPS:]
    return [row for *_, row in first], [row for *_, row in last]


def _format_group(row: Row) -> str:
    """Return the prompt, the reference answer, and the best and the worst completion as Markdown."""
    ranked = sorted(_completions(row), key=lambda completion: -(completion.get("reward") or 0.0))
    best_and_worst = ranked if len(ranked) <= 2 else [ranked[0], ranked[-1]]
    blocks = [f"Prompt (policy version {_oldest_version(row)}):", fenced(str(row.get("prompt", "")))]
    answer = str(row.get("answer") or "")
    if answer:
        blocks += ["Reference answer:", fenced(answer)]
    for completion in best_and_worst:
        blocks += [_completion_caption(completion), fenced(str(completion.get("text", "")))]
    return "\n\n".join(blocks)


def _completion_caption(completion: Row) -> str:
    """Return the reward of a completion and the policy versions that generated it."""
    reward = completion.get("reward")
    caption = "Reward not judged" if reward is None else f"Reward {reward:g}"
    spans = completion.get("spans") or []
    if spans:
        authors = [f"tokens {start} to {end} by version {version}" for version, start, end in spans[:_MAX_SPANS]]
        caption += f" ({', '.join(authors)})"
    return f"{caption}:"


def _oldest_version(row: Row) -> int:
    """Return the oldest policy version that generated a token of the group."""
    spans = [span for completion in _completions(row) for span in completion.get("spans") or []]
    return min((span[0] for span in spans), default=0)


def _completions(row: Row) -> list[dict[str, Any]]:
    completions = row.get("completions")
    if not isinstance(completions, list):
        return []
    return [completion for completion in completions if isinstance(completion, dict)]


def write_report(run_dir: Path, summary: Facts) -> Path:
    """Write summary.json, plots/*.png and report.md from the files of a run. Returns the path of report.md.

    `summary`: result of `summary.summarize`. Sections without data are omitted.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    servers = [read_rows(path) for path in sorted((run_dir / "timeline").glob("rollout-*.jsonl"))]
    plots = write_plots(run_dir, rows_of_kind(rows, "step"), summary, servers)
    write_atomic(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")

    warnings = rows_of_kind(rows, "warning")
    sections = [
        f"# {summary.get('name', run_dir.name)}",
        _verdict_lines(run_dir, summary, warnings),
        _embed_plots(path for path in plots if path.stem in OVERVIEW_PLOTS),
        _fold("All metrics", _headline_table(summary), evaluations_section(summary.get("evaluations") or [])),
        _fold("More plots", _embed_plots(path for path in plots if path.stem not in OVERVIEW_PLOTS)),
        _fold(
            "Groups, ages and log-probabilities",
            _accounting_section(summary),
            _staleness_section(summary),
            _decisions_section(rows_of_kind(rows, "staleness")),
            _logprob_gap_section(summary),
        ),
        _fold("Time", _time_section(summary), _weight_updates_section(summary), _timeline_section(run_dir)),
        _fold(
            "Warnings and notes",
            _lost_servers_section(summary),
            _engine_notes_section(summary),
            _warnings_section(warnings),
        ),
        _fold("Prompts, reference answers and completions", samples_section(run_dir)),
        _fold("Command and configuration", _reproduction_section(run_dir, summary)),
    ]
    return write_atomic(run_dir / "report.md", "\n\n".join(section for section in sections if section) + "\n")


def _verdict_lines(run_dir: Path, summary: Facts, warnings: Sequence[Row]) -> str:
    """Return five lines: the three answers, what was run, and what to do next."""
    answers = judge_run(summary, warnings=len(warnings))
    questions = {"learning": "Is it learning?", "speed": "Is it fast?", "soundness": "Is it sound?"}
    lines = [f"**{questions[answer.question]} {answer.state.capitalize()}.** {answer.text}" for answer in answers]

    run = f"{_figure(summary, 'steps', ',')} steps in {_figure(summary, 'wall_s', ',.0f')} s"
    tokens = f"{_figure(summary, 'trained_tokens', ',')} tokens trained"
    settings = f"S = {_figure(summary, 'max_staleness', '')}, seed {_figure(summary, 'seed', '')}"
    lines.append(f"**What was run?** {run}, {tokens}; {settings}; restarts: {_format_counts(summary, 'restarts')}.")
    lines.append(f"**What next?** {suggest_next_step(summary, answers, str(run_dir))}")
    return "\n".join(f"- {line}" for line in lines)


def _embed_plots(paths: Iterable[Path]) -> str:
    return "\n\n".join(f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in paths)


def _fold(title: str, *sections: str) -> str:
    """Return a collapsible section; "" without content."""
    present = [section for section in sections if section]
    if not present:
        return ""
    return "\n\n".join([f"<details><summary>{title}</summary>", *present, "</details>"])


def _headline_table(summary: Facts) -> str:
    """Return a table of results, cost and checks of the run. Its first row, in bold, is the best measure of learning
    that the run has."""
    score = summary.get("held_out_score", "accuracy")
    form = choose_score_format(score)
    lines = {}
    for sampling, key in (("sampled", "accuracy"), ("greedy", "greedy_accuracy")):
        if summary.get(f"{key}_before") is not None:
            lines[f"held-out {score}, {sampling}"] = _format_change(summary, f"{key}_before", f"{key}_after", form)
    lines["training reward, first and last tenth"] = _format_change(summary, "reward_first", "reward_last", ".3f")

    trainer_idle, servers_idle = _figure(summary, "trainer_idle", ".0%"), _figure(summary, "rollout_idle", ".0%")
    max_age, age_bound = _figure(summary, "max_age", ""), _figure(summary, "age_bound", "")
    generated = f"{_figure(summary, 'generated_tokens', ',')} ({_figure(summary, 'generated_tokens_per_s', ',.0f')}/s)"
    lines |= {
        "optimizer steps": _figure(summary, "steps", ","),
        "tokens trained per second of the steps": _figure(summary, "tokens_per_s", ",.0f"),
        "tokens trained, and generated": f"{_figure(summary, 'trained_tokens', ',')}, {generated}",
        "wall time": _format_wall_time(summary),
        "idle: trainer, and rollout servers": f"{trainer_idle}, {servers_idle}",
        "age of trained tokens": f"max {max_age}, bound {age_bound}",
        "sampling": summary.get("sampling") or "not recorded",
        "log-probability gap, mean": _figure(summary, "logprob_gap_mean", ".2e"),
        "completions that could not be judged": _format_counts(summary, "reward_failures"),
        "restarts": _format_counts(summary, "restarts"),
    }
    rows = [_table_row([name, value]) for name, value in lines.items()]
    first_name, first_value = next(iter(lines.items()))
    rows[0] = _table_row([f"**{first_name}**", f"**{first_value}**"])
    return "\n".join(["| | |", "|---|---|", *rows])


def _format_wall_time(summary: Facts) -> str:
    """Return the wall time and its parts, and the time for the first policy, which it does not include."""
    wall_s, start_s, steps_s = (summary.get(key) or 0.0 for key in ("wall_s", "start_s", "steps_s"))
    rest_s = max(0.0, wall_s - start_s - steps_s)
    parts = f"{start_s:,.0f} s until the first batch, {steps_s:,.0f} s of steps, {rest_s:,.0f} s for everything else"
    text = f"{wall_s:,.0f} s ({parts})"
    prepare_s = summary.get("prepare_s")
    if prepare_s:
        text += f"; before that, the first policy took {prepare_s:,.0f} s"
    return text


def _format_counts(summary: Facts, key: str) -> str:
    """Return the names and counts of a dictionary, without counts of 0; "none" if nothing is left."""
    counts = summary.get(key) or {}
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"


def _accounting_section(summary: Facts) -> str:
    """Return the equation that shows that no group was lost."""
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


def _staleness_section(summary: Facts) -> str:
    """Return the check of the age bound."""
    max_age, bound = summary.get("max_age"), summary.get("age_bound")
    if max_age is None or bound is None:
        return ""
    verdict = "kept" if max_age <= bound else "**BROKEN**"
    return (
        "## Staleness\n\n"
        f"S = {_figure(summary, 'max_staleness', '')}; max age <= bound: {max_age} <= {bound}, {verdict}. "
        f"Mean age over the trained tokens: {_figure(summary, 'mean_age', '.2f')} optimizer steps."
    )


def _decisions_section(rows: list[Row]) -> str:
    """Return a table of the changes of S, with the reason for each."""
    if not rows:
        return ""
    keys = ("step", "staleness_before", "staleness", "reason")
    return "\n".join(
        [
            "### Decisions of max_staleness: auto",
            "",
            "| after step | S before | S | because |",
            "|---|---|---|---|",
            *(_table_row(str(row.get(key)) for key in keys) for row in rows),
        ]
    )


def _logprob_gap_section(summary: Facts) -> str:
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


def _time_section(summary: Facts) -> str:
    """Return the bottleneck, and a table of the parts of the trainer's steps."""
    seconds = summary.get("time_split_s") or {}
    total_s = sum(seconds.values())
    if not total_s:
        return ""
    first_step = summary.get("first_timed_step") or 1
    note = _HEAD_START if first_step > 1 else ""
    meanings = {series.label: series.doc for series in STEP_TIME.series}
    lines = [
        "## Where the time went",
        "",
        summary.get("bottleneck") or "",
        "",
        f"Steps {first_step} to {summary.get('steps')}{note}.",
        "",
        "| part of the step | seconds | share | |",
        "|---|---:|---:|---|",
    ]
    for part, part_s in sorted(seconds.items(), key=lambda entry: -entry[1]):
        if part_s > 0:
            lines.append(_table_row([part, f"{part_s:,.1f}", f"{part_s / total_s:.0%}", meanings.get(part, "")]))
    return "\n".join([*lines, "", _NOT_IN_STEPS])


def _lost_servers_section(summary: Facts) -> str:
    """Return the rollout servers that the run continued without, with the reasons."""
    reasons = (summary.get("given_up") or {}).values()
    if not reasons:
        return ""
    listed = fenced("\n".join(map(str, reasons)), limit=_MAX_NOTE_CHARACTERS)
    return f"## Rollout servers that were given up\n\nThe run continued without them:\n\n{listed}"


def _engine_notes_section(summary: Facts) -> str:
    """Return the reasons why engines did not run as configured."""
    notes = (summary.get("engine_notes") or {}).values()
    if not notes:
        return ""
    listed = fenced("\n".join(map(str, notes)), limit=_MAX_NOTE_CHARACTERS)
    return f"## Engines that did not run as configured\n\n{listed}"


def _weight_updates_section(summary: Facts) -> str:
    """Return the median seconds of weight updates; "" for a run of an older release, which did not measure them."""
    updates = summary.get("weight_updates") or {}
    if updates.get("pause_s") is None:
        return ""
    transfer_s, pause_s, load_s = (_figure(updates, key, ".3f") for key in ("transfer_s", "pause_s", "load_s"))
    return "\n".join(
        [
            "## Weight updates",
            "",
            f"Medians of {updates['updates']:,} updates of all servers, in seconds.",
            "",
            "| part | median | |",
            "|---|---:|---|",
            f"| transfer | {transfer_s} | from the manifest until everything was received; nobody waits |",
            f"| pause | {pause_s} | the engine stands still |",
            f"| load | {load_s} | the part of the pause in which weights are copied |",
        ]
    )


def _warnings_section(warnings: list[Row]) -> str:
    if not warnings:
        return ""
    messages = [str(row.get("message", "")) for row in warnings[:_MAX_WARNINGS]]
    listed = fenced("\n".join(messages), limit=_MAX_NOTE_CHARACTERS)
    return f"## Warnings\n\n{len(warnings)} in metrics.jsonl, the first of them:\n\n{listed}"


def _reproduction_section(run_dir: Path, summary: Facts) -> str:
    """Return the seed, the command that started the run, and its resolved configuration."""
    name = summary.get("name", run_dir.name)
    command = None
    state_file = run_dir / "run.json"
    if state_file.exists():
        command = json.loads(state_file.read_text(encoding="utf-8")).get("command")
    if not command:
        command = f"async-grpo run {run_dir}/config.yaml -o name={name}-again"
    text = f"## Reproduce\n\nSeed {_figure(summary, 'seed', '')}.\n\n{fenced(command)}"

    config_file = run_dir / "config.yaml"
    if not config_file.exists():
        return text
    config = fenced(config_file.read_text(encoding="utf-8").rstrip(), limit=_MAX_CONFIG_CHARACTERS)
    return f"{text}\n\n<details><summary>resolved configuration (config.yaml)</summary>\n\n{config}\n\n</details>"


def _timeline_section(run_dir: Path) -> str:
    if not (run_dir / "timeline.json").exists():
        return ""
    return (
        "## Timeline\n\n"
        "Open <https://ui.perfetto.dev>, choose *Open trace file* and pick `timeline.json` "
        "(it stays in your browser). One row per track: generation, training, weight updates, waits."
    )


def _format_change(summary: Facts, before: str, after: str, form: str) -> str:
    return f"{_figure(summary, before, form)} → {_figure(summary, after, form)}"


def _figure(summary: Facts, key: str, form: str) -> str:
    return figure(summary.get(key), form)
