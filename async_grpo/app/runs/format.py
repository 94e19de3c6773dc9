"""Tables, lines and JSON fields of `async-grpo runs`: the list of runs, one run, a comparison, groups of samples."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from async_grpo.app.runs.compare import FIGURES, Comparison
from async_grpo.app.runs.run import Run, RunStatus
from async_grpo.app.runs.samples import mean_reward
from async_grpo.app.runs.upkeep import Removal
from async_grpo.telemetry.rows import Facts, Row
from async_grpo.utils.text import escape_controls, figure

STYLES = {
    RunStatus.LIVE: "green",
    RunStatus.FINISHED: "blue",
    RunStatus.FAILED: "red",
    RunStatus.INTERRUPTED: "yellow",
}
NEXT_COMMANDS = {
    RunStatus.LIVE: "async-grpo view {0}; async-grpo buffer stats {0}",
    RunStatus.FINISHED: "async-grpo eval {0}; async-grpo resume {0} --steps N trains it further",
    RunStatus.FAILED: "see {0}/logs; fix the cause, then: async-grpo resume {0}",
    RunStatus.INTERRUPTED: "async-grpo resume {0}",
}
"""State of a run -> next command; {0} is its folder."""
WIDTH = 160
"""Width in characters of a table that is written to a file."""


def make_table_console() -> Console:
    """Return a console for tables: the terminal's, or a wide one for files."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, WIDTH))


def list_facts(run: Run) -> dict[str, Any]:
    """Return the fields of a run in the list, as in its JSON."""
    rows = run.rows()
    return _list_facts(run, rows, run.summary(rows))


def _list_facts(run: Run, rows: Sequence[Row], summary: Facts) -> dict[str, Any]:
    keys = ("accuracy_before", "accuracy_after", "reward_last", "tokens_per_s", "wall_s")
    return {
        "run": str(run.path),
        "name": run.name,
        "state": str(run.status()),
        "reason": run.reason,
        "steps": len(run.steps(rows)),
        "of_steps": run.settings().get("steps"),
        **{key: summary.get(key) for key in keys},
        "written_s": run.written_s,
    }


def run_facts(run: Run) -> dict[str, Any]:
    """Return the fields of `async-grpo runs show`, as in its JSON: those of the list, results, warnings, files and next
    command."""
    rows = run.rows()
    summary = run.summary(rows)
    facts = _list_facts(run, rows, summary)
    return {
        **facts,
        "figures": {key: summary.get(key) for key in FIGURES},
        "warnings": len(run.warnings(rows)),
        "files": _files(run),
        "next": NEXT_COMMANDS[RunStatus(facts["state"])].format(run.path),
    }


def print_list(rows: list[dict[str, Any]]) -> None:
    """Print a table of `list_facts`."""
    # Points of a sweep differ at the end of their names, so a long name is wrapped, not cut.
    folder = Column("run", overflow="fold")
    table = Table(folder, "state", "steps", "held-out score", "reward", "tokens/s", "wall", "last written")
    for row in rows:
        table.add_row(*_list_cells(row))

    console = make_table_console()
    if not console.is_terminal:
        console.width += max(len(row["run"]) for row in rows)  # in a file, a name is on one line and can be copied
    console.print(table)


def print_run(facts: dict[str, Any]) -> None:
    """Print `run_facts` as a table."""
    table = Table(show_header=False, title=escape_controls(facts["name"]))
    table.add_row("state", Text(facts["state"], STYLES[RunStatus(facts["state"])]))
    if facts["reason"]:
        table.add_row("reason", Text(escape_controls(facts["reason"], 400)))
    for key, (label, form) in FIGURES.items():
        if facts["figures"][key] is not None:
            table.add_row(label, figure(facts["figures"][key], form))
    table.add_row("warnings", str(facts["warnings"]))
    for label, files in facts["files"].items():
        table.add_row(label, Text(files))

    make_table_console().print(table)
    # Outside the table, which would fold it: it is a command to copy.
    make_table_console().print(Text(f"next: {facts['next']}"), soft_wrap=True)


def make_comparison_table(comparison: Comparison) -> Table:
    """Return a table of differing settings and of metrics: a column per run, then the ratio of last to first."""
    table = Table("", *(escape(escape_controls(name)) for name in comparison.names), "ratio")
    for key, values in comparison.settings.items():
        table.add_row(key, *(Text(escape_controls(str(value), 60)) for value in values), "")
    table.add_section()
    for key, (label, form) in FIGURES.items():
        if any(value is not None for value in comparison.figures[key]):
            cells = [figure(value, form) for value in comparison.figures[key]]
            table.add_row(label, *cells, figure(comparison.ratio(key), ".2f"))
    return table


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """Return the fields of `async-grpo runs compare`, as in its JSON."""
    return {
        "runs": comparison.names,
        "settings": comparison.settings,
        "figures": comparison.figures,
        "ratios": {key: comparison.ratio(key) for key in comparison.figures},
    }


def format_group(row: dict[str, Any], limit: int) -> Iterator[str]:
    """Yield the lines of a group. Each text has one line of at most `limit` characters; equal completions share one.

    Completions of `rescore_groups` have two rewards: `old -> new`.
    """
    yield f"group {row.get('seq')}, policy version {row.get('admitted_version')}, mean reward {mean_reward(row):.3f}"
    yield f"  prompt: {escape_controls(str(row.get('prompt', '')), limit)}"
    yield f"  answer: {escape_controls(str(row.get('answer', '')), limit)}"
    completions = Counter(
        (sample.get("reward"), _rewards_of(sample), str(sample.get("text", ""))) for sample in row["completions"]
    )
    for (_, rewards, text), count in sorted(completions.items(), key=lambda entry: -(entry[0][0] or 0.0)):
        times = f"({count} times) " if count > 1 else ""
        yield f"  {rewards:>6}  {times}{escape_controls(text, limit)}"


def _rewards_of(sample: dict[str, Any]) -> str:
    """Return the reward, or `old -> new` if the sample was scored again."""
    reward = figure(sample.get("reward"), ".2f")
    if "new_reward" not in sample:
        return reward
    return f"{reward} -> {figure(sample['new_reward'], '.2f')}"


def describe_removal(removal: Removal) -> str:
    """Return the part of a run that is deleted, its size, and the server of its keys."""
    size = f" ({removal.size_bytes / 1e6:,.1f} MB)" if removal.paths else ""
    server = f", keys on {removal.redis.url}" if removal.redis is not None else ""
    return f"{removal.part} of {removal.run.path}{size}{server}"


def _list_cells(row: dict[str, Any]) -> Iterator[Text | str]:
    """Yield the cells of a row of `print_list`."""
    yield Text(escape_controls(row["run"]))
    yield Text(row["state"], STYLES[RunStatus(row["state"])])
    yield f"{row['steps']}/{row['of_steps'] or '?'}"
    before, after = figure(row["accuracy_before"], ".3f"), figure(row["accuracy_after"], ".3f")
    yield before if row["accuracy_after"] is None else f"{before} → {after}"
    yield figure(row["reward_last"], ".3f")
    yield figure(row["tokens_per_s"], ",.0f")
    yield figure(row["wall_s"], ",.0f") + " s"
    yield time.strftime("%Y-%m-%d %H:%M", time.localtime(row["written_s"]))


def _files(run: Run) -> dict[str, str]:
    """Return the files that exist and the folders that are not empty, by their names."""
    files = {}
    for name in ("report.md", "summary.json", "timeline.json", "metrics.jsonl", "checkpoints/hf"):
        if (run.path / name).exists():
            files[name] = str(run.path / name)
    for folder in ("samples", "plots", "logs"):
        count = len(run.files(folder))
        if count:
            files[folder] = f"{run.path / folder} ({count} files)"
    return files
