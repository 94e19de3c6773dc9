"""Overviews, lists of groups and records, rendered for the terminal. Pure functions.

All text from outside (prompts, completions, names) passes through `escape_controls` and is printed as `Text`, never as
markup, so a model can neither colour the terminal nor move its cursor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import numpy as np
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from async_grpo.utils.text import escape_controls, figure
from buffer.inspector import GroupFacts, GroupState, Overview

BAR_CELLS = 32
PREVIEW = 8
"""Number of elements shown from the start of an array; half as many from its end."""
_KEY = "cyan"


def render_overview(overview: Overview) -> Table:
    """Render counters, window, ages, leases and memory."""
    stats = overview.stats
    policy = overview.policy
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_KEY, no_wrap=True)
    table.add_column()
    table.add_row("run", Text(escape_controls(overview.run), style="bold"))
    table.add_row("trainer", f"head version {stats.version}, epoch {stats.epoch}, committed {overview.committed}")
    table.add_row("window", _window(overview))
    table.add_row("groups", f"{stats.inflight} in flight, {stats.ready} ready, {stats.taken} taken, {stats.kept} kept")
    table.add_row("tasks", f"{stats.waiting:,} waiting of {stats.tasks_put:,} put, {stats.admitted:,} admitted")
    table.add_row("uses", f"{stats.inserted:,} groups inserted, {stats.used:,} uses, {policy.max_uses} allowed each")
    table.add_row("released", _counts(stats.released))
    table.add_row("age, ready", _counts({f"age {age}": count for age, count in overview.ages.items()}))
    table.add_row("leases", _leases(overview))
    table.add_row("policy", _policy(overview))
    table.add_row("admission", _admission(overview))
    table.add_row("server", _memory(overview))
    if not stats.balanced:
        table.add_row("", Text("counters and sets disagree: repeat the command, or report a bug", style="bold red"))
    return table


def render_groups(groups: Sequence[GroupFacts], head_version: int, limit: int) -> Table:
    """Render one row per group, sorted by state and sequence number, with at most `limit` groups per state."""
    table = Table(title=f"{len(groups)} groups, head version {head_version}", title_justify="left")
    for column in ("seq", "attempt", "expired", "uses", "oldest", "newest", "age", "step", "longest", "size"):
        table.add_column(column, justify="right")
    table.add_column("lease")
    table.columns[0].header = "state / seq"
    for state in GroupState:
        groups_in_state = [group for group in groups if group.state is state]
        for group in groups_in_state[:limit]:
            table.add_row(*_group_cells(group, head_version))
        hidden = len(groups_in_state) - limit
        if hidden > 0:
            table.add_row(f"{state} ...", *[""] * 9, f"{hidden} more: raise --limit", style="dim")
    return table


def render_record(title: str, record: object, max_characters: int) -> Tree:
    """Render a record as a tree. Text is cut after `max_characters`; of long arrays both ends are shown."""
    tree = Tree(Text(escape_controls(title), style="bold"))
    _add_branches(tree, record, max_characters)
    return tree


def format_bytes(count: float) -> str:
    """Format a number of bytes with its unit: 1536 is "1.5 KiB"."""
    power = min(3, max(0, int(count).bit_length() - 1) // 10)
    if power == 0:
        return f"{count:.0f} B"
    unit = ("KiB", "MiB", "GiB")[power - 1]
    return f"{count / 1024**power:.1f} {unit}"


def _window(overview: Overview) -> RenderableType:
    stats = overview.stats
    capacity = overview.policy.window.capacity
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(max(1, capacity), min(stats.active, capacity), width=BAR_CELLS, finished_style="yellow")
    effective = "" if stats.staleness == stats.max_staleness else f" (effective; at most {stats.max_staleness})"
    formula = f"(S + 1) * P, S = {stats.staleness}{effective}, P = {stats.groups_per_step}"
    row.add_row(bar, f"{stats.active} of {capacity} = {formula}")
    return row


def _leases(overview: Overview) -> str:
    counts = f"{overview.held} held, {overview.expired} expired, {overview.given_back} given back"
    oldest = overview.oldest_lease
    if oldest is None or oldest.lease_s is None:
        return counts
    return f"{counts}; the oldest: group {oldest.seq}, attempt {oldest.attempt}, {_lease_state(oldest)}"


def _policy(overview: Overview) -> str:
    policy = overview.policy
    window = f"({policy.selector_window})" if policy.selector_window > 1 else ""
    return f"{policy.selector}{window}, on stale {policy.on_stale}, age bound {policy.age_bound}"


def _admission(overview: Overview) -> Text:
    stats = overview.stats
    if stats.ended:
        return Text("the run has ended")
    if overview.drained:
        return Text("stopped by `buffer drain`; undo it with `buffer drain --resume`", style="bold yellow")
    return Text(f"open; horizon {stats.horizon:,} uses")


def _memory(overview: Overview) -> str:
    memory = overview.memory
    limit = f" of {format_bytes(memory.limit_bytes)}" if memory.limit_bytes else ", no limit"
    return f"{format_bytes(memory.used_bytes)}{limit}, {memory.keys:,} keys"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


def _group_cells(group: GroupFacts, head_version: int) -> list[str]:
    age = "-"
    if group.oldest_version is not None and group.state is not GroupState.KEPT:
        age = str(max(0, head_version - group.oldest_version))
    return [
        f"{group.state} {group.seq}",
        str(group.attempt),
        str(group.expired_leases or ""),
        str(group.uses or ""),
        figure(group.oldest_version, ""),
        figure(group.newest_version, ""),
        age,
        figure(group.step, ""),
        figure(group.longest, ""),
        format_bytes(group.size_bytes) if group.size_bytes else "-",
        _lease_state(group) if group.state is GroupState.INFLIGHT else "",
    ]


def _lease_state(group: GroupFacts) -> str:
    if group.lease_s is None:
        return "given back"
    if group.lease_s > 0:
        return f"expires in {group.lease_s:.1f} s"
    return f"expired {-group.lease_s:.1f} s ago"


def _add_branches(tree: Tree, value: object, max_characters: int) -> None:
    """Add a branch per field or element that contains records, and a leaf for anything else."""
    if isinstance(value, list):
        value = {f"[{index}]": element for index, element in enumerate(value)}
    if not isinstance(value, dict):
        tree.add(_leaf(value, max_characters))
        return

    for name, element in value.items():
        label = Text(escape_controls(str(name)), style=_KEY)
        if _contains_records(element):
            branch = tree.add(label.append(f"  {len(element)}", style="dim"))
            _add_branches(branch, element, max_characters)
        else:
            tree.add(label.append("  ").append(_leaf(element, max_characters)))


def _contains_records(value: object) -> TypeGuard[dict[object, object] | list[object]]:
    if isinstance(value, list):
        return any(isinstance(element, dict) for element in value)
    return isinstance(value, dict)


def _leaf(value: object, max_characters: int) -> Text:
    if isinstance(value, np.ndarray):
        header = Text(f"{value.dtype.name}[{len(value):,}] ", style="dim")
        return header.append(_array_preview(value), style="default")
    if isinstance(value, bytes):
        preview = value[:PREVIEW].hex(" ")
        if len(value) > PREVIEW:
            preview += " ..."
        return Text(f"{len(value):,} bytes ", style="dim").append(preview, style="default")
    return Text(escape_controls(str(value), max_characters), style="green" if isinstance(value, str) else "default")


def _array_preview(array: np.ndarray) -> str:
    """All elements of a short array, or both ends of a long one."""
    template = "{:.4g}" if array.dtype.kind == "f" else "{}"
    elements = [template.format(element) for element in array.tolist()]
    if len(elements) <= 2 * PREVIEW:
        return ", ".join(elements)
    return f"{', '.join(elements[:PREVIEW])}, ... {', '.join(elements[-PREVIEW // 2 :])}"
