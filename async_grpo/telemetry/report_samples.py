"""A few completions from the beginning and the end of a run, for the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_grpo.telemetry.escape import fenced
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import Row

_GROUPS = 2
_COMPLETIONS = 2


def samples_section(run_dir: Path) -> str:
    """Markdown, with every piece of model output in a block it cannot leave; "" without samples."""
    rows = [row for path in sorted((run_dir / "samples").glob("*.jsonl")) for row in read_rows(path)]
    rows = sorted((row for row in rows if _completions(row)), key=_version)
    if not rows:
        return ""
    early, late = rows[:_GROUPS], rows[_GROUPS:][-_GROUPS:]
    blocks = ["## Samples", "### Early in training", *map(_group, early)]
    if late:
        blocks += ["### Late in training", *map(_group, late)]
    return "\n\n".join(blocks)


def _group(row: Row) -> str:
    """The prompt, and its best and worst completion."""
    ranked = sorted(_completions(row), key=lambda completion: -(completion.get("reward") or 0.0))
    shown = ranked if len(ranked) <= _COMPLETIONS else [ranked[0], ranked[-1]]
    blocks = [f"Prompt (policy version {_version(row)}):", fenced(str(row.get("prompt", "")))]
    for completion in shown:
        blocks += [_caption(completion), fenced(str(completion.get("text", "")))]
    return "\n\n".join(blocks)


def _caption(completion: Row) -> str:
    """Its reward and the policy versions that wrote it."""
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
