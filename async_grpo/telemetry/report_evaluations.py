"""The part of report.md that says how good the policy became, version by version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from async_grpo.evaluation.words import INTERVALS, no_vote, rows_of, shown
from async_grpo.telemetry.rows import Row
from async_grpo.wire.board import Figures

_HOW = "Sampled at temperature 1 by one pinned version each. See docs/evaluation.md."


def evaluations_section(evaluations: Sequence[Row]) -> str:
    """A table of the versions, one of the sources of the last, and why a figure is missing; "" without figures."""
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
    found = [(name, msgspec.convert(row, Figures)) for name, row in rows]
    estimates = [rows_of(figures, samples) for _, figures in found]
    names = list(dict.fromkeys(name for row in estimates for name in row))
    lines = [f"| {' | '.join([key, 'prompts', *names])} |", f"|{'---|' * (len(names) + 2)}"]
    for (label, figures), row in zip(found, estimates, strict=True):
        lines.append(f"| {' | '.join([label, str(figures.prompts), *(shown(row.get(name)) for name in names)])} |")
    return "\n".join(lines)


def _remarks(row: Row) -> str:
    reason, unjudged = row.get("no_majority"), row["figures"].get("unjudged")
    remarks = f" No maj@{_samples(row)}: {_cell(str(reason))}." if reason else ""
    remarks += f" {unjudged} completions could not be judged and are left out." if unjudged else ""
    unextracted = row["figures"].get("unextracted")
    return remarks + (f" {no_vote(unextracted, _samples(row))}; `logs/` has why." if unextracted else "")


def _samples(row: Row) -> int:
    return int(row.get("samples") or 1)


def _cell(text: str) -> str:
    """Of data and configuration: nothing that Markdown would take for its own."""
    return "`" + "".join(c if c.isprintable() and c not in "`|" else "?" for c in text)[:80] + "`"
