"""Overviews, lists of groups and records to print. Pure.

All text from outside (prompts, completions, names) passes through `escape_controls` and is a `Text`, never
markup: a model can neither colour the terminal nor move its cursor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
"""Elements of an array that are shown at its beginning; half as many at its end."""
_KEY = "cyan"


def overview_view(overview: Overview) -> Table:
    """Counters, window, ages, leases and memory."""
    stats, policy = overview.stats, overview.policy
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
        table.add_row("", Text("counters and sets differ: look again, or report a defect", style="bold red"))
    return table


def groups_view(groups: Sequence[GroupFacts], head_version: int, limit: int) -> Table:
    """One group a row, by state and sequence, at most `limit` of each state."""
    table = Table(title=f"{len(groups)} groups, head version {head_version}", title_justify="left")
    for column in ("seq", "attempt", "strikes", "uses", "oldest", "newest", "age", "step", "longest", "size"):
        table.add_column(column, justify="right")
    table.add_column("lease")
    table.columns[0].header = "state / seq"
    for state in GroupState:
        of_state = [group for group in groups if group.state is state]
        for group in of_state[:limit]:
            table.add_row(*_cells(group, head_version))
        if len(of_state) > limit:
            table.add_row(f"{state} ...", *[""] * 9, f"{len(of_state) - limit} more: raise --limit", style="dim")
    return table


def record_view(title: str, record: object, characters: int) -> Tree:
    """A record as a tree; text is cut after `characters` characters, arrays show their ends."""
    tree = Tree(Text(escape_controls(title), style="bold"))
    _grow(tree, record, characters)
    return tree


def human_bytes(count: float) -> str:
    """A number of bytes with its unit: 1536 is "1.5 KiB"."""
    power = min(3, max(0, int(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}" if power else f"{count:.0f} B"


def _window(overview: Overview) -> RenderableType:
    stats, capacity = overview.stats, overview.policy.window.capacity
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(max(1, capacity), min(stats.active, capacity), width=BAR_CELLS, finished_style="yellow")
    bound = "" if stats.staleness == stats.max_staleness else f" (effective; at most {stats.max_staleness})"
    formula = f"(S + 1) * P, S = {stats.staleness}{bound}, P = {stats.groups_per_step}"
    row.add_row(bar, f"{stats.active} of {capacity} = {formula}")
    return row


def _leases(overview: Overview) -> str:
    text = f"{overview.held} held, {overview.expired} expired, {overview.given_back} given back"
    oldest = overview.oldest_lease
    if oldest is None or oldest.lease_s is None:
        return text
    return f"{text}; the oldest: group {oldest.seq}, attempt {oldest.attempt}, {_lease(oldest)}"


def _policy(overview: Overview) -> str:
    policy = overview.policy
    window = f"({policy.selector_window})" if policy.selector_window > 1 else ""
    return f"{policy.selector}{window}, on stale {policy.on_stale}, age bound {policy.age_bound}"


def _admission(overview: Overview) -> Text:
    stats = overview.stats
    if stats.ended:
        return Text("the run has ended")
    if overview.drained:
        return Text("stopped by `buffer drain`; `buffer drain --resume` goes on", style="bold yellow")
    return Text(f"open; horizon {stats.horizon:,} uses")


def _memory(overview: Overview) -> str:
    memory = overview.memory
    limit = f" of {human_bytes(memory.limit_bytes)}" if memory.limit_bytes else ", no limit"
    return f"{human_bytes(memory.used_bytes)}{limit}, {memory.keys:,} keys"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


def _cells(group: GroupFacts, head_version: int) -> list[str]:
    known_age = group.oldest_version is not None and group.state is not GroupState.KEPT
    return [
        f"{group.state} {group.seq}",
        str(group.attempt),
        str(group.strikes or ""),
        str(group.uses or ""),
        figure(group.oldest_version, ""),
        figure(group.newest_version, ""),
        str(max(0, head_version - (group.oldest_version or 0))) if known_age else "-",
        figure(group.step, ""),
        figure(group.longest, ""),
        human_bytes(group.size_bytes) if group.size_bytes else "-",
        _lease(group) if group.state is GroupState.INFLIGHT else "",
    ]


def _lease(group: GroupFacts) -> str:
    if group.lease_s is None:
        return "given back"
    return f"expires in {group.lease_s:.1f} s" if group.lease_s > 0 else f"expired {-group.lease_s:.1f} s ago"


def _grow(tree: Tree, value: object, characters: int) -> None:
    """Add a branch for each field or element that has records in it, and a leaf for anything else."""
    if isinstance(value, list):
        value = {f"[{number}]": each for number, each in enumerate(value)}
    if not isinstance(value, dict):
        tree.add(_leaf(value, characters))
        return
    for name, each in value.items():
        label = Text(escape_controls(str(name)), style=_KEY)
        if isinstance(each, dict) or (isinstance(each, list) and any(isinstance(item, dict) for item in each)):
            _grow(tree.add(label.append(f"  {len(each)}", style="dim")), each, characters)
        else:
            tree.add(label.append("  ").append(_leaf(each, characters)))


def _leaf(value: object, characters: int) -> Text:
    if isinstance(value, np.ndarray):
        return Text(f"{value.dtype.name}[{len(value):,}] ", style="dim").append(_preview(value), style="default")
    if isinstance(value, bytes):
        shown = value[:PREVIEW].hex(" ") + (" ..." if len(value) > PREVIEW else "")
        return Text(f"{len(value):,} bytes ", style="dim").append(shown, style="default")
    return Text(escape_controls(str(value), characters), style="green" if isinstance(value, str) else "default")


def _preview(array: np.ndarray) -> str:
    """The elements of an array; of a long one, those at its ends."""
    shown = [f"{each:.4g}" if array.dtype.kind == "f" else str(each) for each in array.tolist()]
    if len(shown) <= 2 * PREVIEW:
        return ", ".join(shown)
    return f"{', '.join(shown[:PREVIEW])}, ... {', '.join(shown[-PREVIEW // 2 :])}"
