"""SampleIndex: the position of each group of a run in samples/*.jsonl, with the columns to filter and sort by.

    samples/NAME.jsonl --read_new_lines, a slice at a time--> columns --select_groups--> groups --read_line--> rows
    trained.jsonl --------------------------------------------^

Texts stay on disk. The columns take about 50 bytes per completion, so a million completions fit into memory. Pages are
shown while the index is being built.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from async_grpo.lab.view.followed import FollowedFiles
from async_grpo.telemetry.jsonl import parse_rows

GROWTH_WINDOW = 32
GROWTH = 1.5
"""Completions have grown if their mean length over GROWTH_WINDOW groups is GROWTH times that of the first window."""
UNTRAINED = -1
"""Step of a group that no step has trained (yet), in a column of integers."""
MAX_OFFSET_DIGITS = 18
"""Digits of the largest byte offset that fits into int64."""


class _Completion(msgspec.Struct):
    """The indexed fields of a completion. Decoding skips texts and tokens."""

    spans: list[tuple[int, int, int]] = []
    reward: float | None = None
    finish_reason: str = ""
    age: int = 0


class _Row(msgspec.Struct):
    seq: int
    completions: list[_Completion]
    server: str = ""
    time_s: float = 0.0


class SamplesQuery(BaseModel):
    """A filter on completions and the order of their groups. None and "" match all; limits are inclusive."""

    model_config = ConfigDict(extra="forbid")

    q: str = Field(default="", max_length=400)
    regex: bool = False
    within: Literal["any", "prompt", "completion"] = "any"
    sort: Literal["newest", "oldest", "reward", "spread", "length", "age", "step"] = "newest"
    start: int = Field(default=0, ge=0)
    limit: int = Field(default=25, ge=1, le=200)
    reward_min: float | None = None
    reward_max: float | None = None
    age_min: int | None = None
    age_max: int | None = None
    version_min: int | None = None
    """Completions with a token of this policy version or a newer one."""
    version_max: int | None = None
    """Completions with a token of this policy version or an older one."""
    step_min: int | None = None
    step_max: int | None = None
    finish: str = ""
    server: str = ""
    state: Literal["", "trained", "untrained", "unverifiable"] = ""


class NameTable:
    """Numbers the distinct texts of a column, such as server names."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def add(self, name: str) -> int:
        """Return the number of the name; a new name gets the next number."""
        if name not in self._numbers:
            self._numbers[name] = len(self.all)
            self.all.append(name)
        return self._numbers[name]

    def find(self, name: str) -> int:
        """Return the number of the name; -1, which no row has, if the name is unknown."""
        return self._numbers.get(name, -1)


class SampleIndex:
    """The groups of one run folder. Not thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "samples"
        self._decode = msgspec.json.Decoder(_Row).decode
        self._reset()

    def _reset(self) -> None:
        self._samples = FollowedFiles(self._folder, "*.jsonl")
        self._trained_rows = FollowedFiles(self._run_dir, "trained.jsonl")
        self.trained: dict[int, dict[str, Any]] = {}
        """Sequence number -> step, skipped, mask_below and advantages of the last step that trained the group."""
        self.unreadable = 0
        self.files = NameTable()
        self.servers = NameTable()
        self.finishes = NameTable()

        # One entry per group.
        self._file = array("i")
        self._offset = array("q")
        self._size = array("q")
        self._seq = array("q")
        self._time = array("d")
        self._server = array("i")
        # The completions of group g are self._first[g] up to self._first[g + 1].
        self._first = array("q", [0])

        # One entry per completion. Oldest and newest are policy versions of its tokens.
        self._group = array("i")
        self._tokens = array("i")
        self._age = array("i")
        self._reward = array("d")
        self._oldest = array("i")
        self._newest = array("i")
        self._finish = array("i")

    def __len__(self) -> int:
        return len(self._seq)

    @property
    def completions(self) -> int:
        """Number of indexed completions."""
        return len(self._group)

    def read_new_lines(self, budget_s: float) -> float:
        """Index new lines for at most `budget_s` seconds, from the start if another run has replaced a file.

        Returns the share of the bytes that is indexed; 1 means all.
        """
        if self._samples.are_replaced() or self._trained_rows.are_replaced():
            self._reset()
        self._trained_rows.read_lines(self._add_trained, math.inf)
        return self._samples.read_lines(self._add_samples, time.monotonic() + budget_s)

    def _add_trained(self, _path: Path, _offset: int, lines: list[bytes]) -> None:
        for row in parse_rows(lines):
            step = {key: row.get(key) for key in ("step", "skipped", "mask_below")}
            for seq, advantages in (row.get("groups") or {}).items():
                self.trained[int(seq)] = {**step, "advantages": advantages}

    def _add_samples(self, path: Path, offset: int, lines: list[bytes]) -> None:
        for line in lines:
            self._add_group(path.name, offset, line)
            offset += len(line)

    def _add_group(self, name: str, offset: int, line: bytes) -> None:
        try:
            row = self._decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if line.strip():
                self.unreadable += 1
            return

        group = len(self._seq)
        self._file.append(self.files.add(name))
        self._offset.append(offset)
        self._size.append(len(line))
        self._seq.append(row.seq)
        self._time.append(row.time_s)
        self._server.append(self.servers.add(row.server))
        for completion in row.completions:
            oldest = newest = tokens = 0
            if completion.spans:
                oldest, _, _ = completion.spans[0]
                newest, _, tokens = completion.spans[-1]
            self._group.append(group)
            self._tokens.append(tokens)
            self._oldest.append(oldest)
            self._newest.append(newest)
            self._age.append(completion.age)
            self._reward.append(math.nan if completion.reward is None else completion.reward)
            self._finish.append(self.finishes.add(completion.finish_reason))
        self._first.append(len(self._group))

    def select_groups(self, query: SamplesQuery) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the sorted groups with a completion that passes the filters, and a mask of the passing completions.

        int64 [groups] and bool [completions]. Texts are not searched.
        """
        passing = self._passing_completions(query)
        groups = np.unique(_column(self._group)[passing]).astype(np.int64)
        keys = self._sort_keys(query.sort)[groups]
        return groups[np.argsort(keys, kind="stable")], passing

    def _passing_completions(self, query: SamplesQuery) -> npt.NDArray[np.bool_]:
        group = _column(self._group)
        reward = _column(self._reward)
        passing = np.ones(len(group), np.bool_)
        limits = (
            (reward, query.reward_min, query.reward_max),
            (self.ages(), query.age_min, query.age_max),
            (_column(self._newest), query.version_min, None),
            (_column(self._oldest), None, query.version_max),
        )
        for values, low, high in limits:
            if low is not None:
                passing &= values >= low
            if high is not None:
                passing &= values <= high
        if query.finish:
            passing &= _column(self._finish) == self.finishes.find(query.finish)
        if query.server:
            passing &= _column(self._server)[group] == self.servers.find(query.server)
        if query.state == "unverifiable":
            passing &= np.isnan(reward)
        if query.state in ("trained", "untrained") or query.step_min is not None or query.step_max is not None:
            passing &= self._match_trained_step(query)[group]
        return passing

    def _match_trained_step(self, query: SamplesQuery) -> npt.NDArray[np.bool_]:
        """True for each group that passes the filters on its state and on the step that trained it, bool [groups]."""
        steps = self.steps()
        if query.state == "untrained":
            return steps == UNTRAINED
        low = max(0, query.step_min or 0)  # excludes UNTRAINED
        high = np.inf if query.step_max is None else query.step_max
        return (steps >= low) & (steps <= high)

    def steps(self) -> npt.NDArray[np.int64]:
        """Return the step that trained each group, or UNTRAINED."""
        trained = self.trained
        return np.array([trained[seq]["step"] if seq in trained else UNTRAINED for seq in self._seq], np.int64)

    def ages(self) -> npt.NDArray[np.int64]:
        """Return the age of each completion's oldest token in the step that trained it.

        For an untrained group it is the age when the group was finished.
        """
        steps = self.steps()[_column(self._group)]
        has_no_trained_age = (steps == UNTRAINED) | (_column(self._tokens) == 0)
        return np.where(has_no_trained_age, _column(self._age), steps - 1 - _column(self._oldest))

    def _sort_keys(self, sort: str) -> npt.NDArray[Any]:
        """Return the sort key of each group, ascending."""
        if sort in ("newest", "oldest"):
            times = _column(self._time)
            return times if sort == "oldest" else -times
        if sort == "step":
            steps = self.steps()
            return np.where(steps == UNTRAINED, np.iinfo(np.int64).max, steps)  # untrained groups last
        if sort == "age":
            return -self._reduce_groups(self.ages(), np.maximum)
        if sort == "length":
            return -self._reduce_groups(_column(self._tokens), np.maximum)
        reward = _column(self._reward)
        judged = ~np.isnan(reward)
        if sort == "spread":
            high = self._reduce_groups(np.where(judged, reward, -np.inf), np.maximum)
            low = self._reduce_groups(np.where(judged, reward, np.inf), np.minimum)
            return np.where(high >= low, low - high, 0.0)
        count = self._reduce_groups(judged.astype(np.float64), np.add)
        return -self._reduce_groups(np.where(judged, reward, 0.0), np.add) / np.maximum(count, 1)

    def _reduce_groups(self, values: npt.NDArray[Any], reduction: np.ufunc) -> npt.NDArray[Any]:
        """Reduce the values of each group's completions; 0 for a group without completions."""
        first = _column(self._first)
        has_completions = first[1:] > first[:-1]
        result = np.zeros(len(self), values.dtype)
        if has_completions.any():
            # Leave empty groups out: reduceat returns the next value for an empty range, not 0.
            result[has_completions] = reduction.reduceat(values, first[:-1][has_completions])
        return result

    def group_entry(self, group: int) -> dict[str, Any]:
        """Return the fields of a group in the list, without its texts."""
        completions = self.completion_slice(group)
        rewards = [None if math.isnan(reward) else reward for reward in self._reward[completions]]
        oldest = min(self._oldest[completions], default=0)
        newest = max(self._newest[completions], default=0)
        training = self.trained.get(self._seq[group])
        step = None
        age = max(self._age[completions], default=0)
        if training is not None:
            step = training["step"]
            age = step - 1 - oldest
        return {
            "id": f"{self.files.all[self._file[group]]}@{self._offset[group]}",
            "seq": self._seq[group],
            "server": self.servers.all[self._server[group]],
            "time_s": self._time[group],
            "step": step,
            "rewards": rewards,
            "tokens": list(self._tokens[completions]),
            "age": age,
            "versions": [oldest, newest],
        }

    def completion_slice(self, group: int) -> slice:
        """Return the slice of the group's completions among all completions of the run."""
        return slice(self._first[group], self._first[group + 1])

    def read_line(self, group: int) -> bytes:
        """Return the row of the group from its file."""
        with (self._folder / self.files.all[self._file[group]]).open("rb") as file:
            file.seek(self._offset[group])
            return file.read(self._size[group])

    def find_group(self, identity: str) -> int | None:
        """Return the group with an `id` from `group_entry`; None if there is none."""
        name, _, offset = identity.rpartition("@")
        if not offset.isdecimal() or len(offset) > MAX_OFFSET_DIGITS:
            return None
        is_group = (_column(self._file) == self.files.find(name)) & (_column(self._offset) == int(offset))
        groups = np.flatnonzero(is_group)
        return int(groups[0]) if len(groups) else None

    def filter_options(self) -> dict[str, Any]:
        """Return the values to filter by, and the first group whose completions have grown."""
        reward = _column(self._reward)
        newest = _column(self._newest)
        judged = reward[~np.isnan(reward)]
        return {
            "finishes": sorted(filter(None, self.finishes.all)),
            "servers": sorted(filter(None, self.servers.all)),
            "rewards": [float(judged.min()), float(judged.max())] if len(judged) else None,
            "age": int(self.ages().max(initial=0)),
            "versions": [int(min(self._oldest, default=0)), int(newest.max()) if len(newest) else 0],
            "steps": int(max((training["step"] for training in self.trained.values()), default=0)),
            "growth": self._find_growth(),
        }

    def _find_growth(self) -> dict[str, Any] | None:
        """Return the earliest group at which completions have grown; None if they have not."""
        if len(self) < 2 * GROWTH_WINDOW:
            return None
        counts = np.maximum(np.diff(_column(self._first)), 1)
        order = np.argsort(_column(self._time), kind="stable")
        lengths = (self._reduce_groups(_column(self._tokens).astype(np.float64), np.add) / counts)[order]
        means = np.convolve(lengths, np.full(GROWTH_WINDOW, 1 / GROWTH_WINDOW), "valid")
        grown = np.flatnonzero(means >= GROWTH * means[0])
        if not len(grown) or not means[0]:
            return None
        group = int(order[grown[0] + GROWTH_WINDOW - 1])
        return {**self.group_entry(group), "from_tokens": float(means[0]), "to_tokens": float(means[grown[0]])}


def _column(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return a copy as an array: a column cannot grow while a view of its buffer exists."""
    return np.array(values)
