"""SampleIndex: where each group of a run is in samples/*.jsonl, with the columns to filter and sort by.

    samples/NAME.jsonl --SampleIndex.update, a slice at a time--> columns --select--> places --read--> rows
    trained.jsonl ------------------------------------------------^

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

GROWTH_WINDOW, GROWTH = 32, 1.5
"""Completions count as grown once the mean length over a window of GROWTH_WINDOW groups is GROWTH times that of the
first window."""
UNTRAINED = -1
"""Step of a group that no step has trained (yet)."""


class _Completion(msgspec.Struct):
    """The indexed fields of a completion; decoding skips texts and tokens."""

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


class Names:
    """Assigns numbers to the distinct texts of a column, such as server names."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The number of the name; a new name gets the next number."""
        if name not in self._numbers:
            self._numbers[name] = len(self.all)
            self.all.append(name)
        return self._numbers[name]

    def find(self, name: str) -> int:
        """The number of the name, -1 if it has none."""
        return self._numbers.get(name, -1)


class SampleIndex:
    """The groups of one run folder. Not thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "samples"
        self._decode = msgspec.json.Decoder(_Row).decode
        self._begin()

    def _begin(self) -> None:
        self._samples = FollowedFiles(self._folder, "*.jsonl")
        self._trained_rows = FollowedFiles(self._run_dir, "trained.jsonl")
        self.trained: dict[int, dict[str, Any]] = {}
        """Sequence number of a trained group -> step, skipped, mask_below and advantages of the last step that trained
        it."""
        self.unreadable = 0
        self.files, self.servers, self.finishes = Names(), Names(), Names()
        # one entry a group
        self._file, self._offset, self._size = array("i"), array("q"), array("q")
        self._seq, self._time, self._server = array("q"), array("d"), array("i")
        self._first = array("q", [0])
        # one entry a completion
        self._group, self._tokens, self._age = array("i"), array("i"), array("i")
        self._reward, self._oldest, self._newest, self._finish = array("d"), array("i"), array("i"), array("i")

    def __len__(self) -> int:
        return len(self._seq)

    @property
    def completions(self) -> int:
        """Number of completions that are indexed."""
        return len(self._group)

    def update(self, budget_s: float) -> float:
        """Continue reading for at most `budget_s` seconds, from the start if another run has taken the folder. Returns
        the share of the bytes that is indexed; 1 means all."""
        if self._samples.are_replaced() or self._trained_rows.are_replaced():
            self._begin()
        self._trained_rows.read_lines(self._add_trained, math.inf)
        return self._samples.read_lines(self._add_samples, time.monotonic() + budget_s)

    def _add_trained(self, _path: Path, _offset: int, lines: list[bytes]) -> None:
        for row in parse_rows(lines):
            facts = {key: row.get(key) for key in ("step", "skipped", "mask_below")}
            for seq, advantages in (row.get("groups") or {}).items():
                self.trained[int(seq)] = {**facts, "advantages": advantages}

    def _add_samples(self, path: Path, offset: int, lines: list[bytes]) -> None:
        for line in lines:
            self._add_group(path.name, offset, line)
            offset += len(line)

    def _add_group(self, name: str, offset: int, line: bytes) -> None:
        try:
            row = self._decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.unreadable += bool(line.strip())
            return
        group = len(self._seq)
        self._file.append(self.files.number(name))
        self._offset.append(offset)
        self._size.append(len(line))
        self._seq.append(row.seq)
        self._time.append(row.time_s)
        self._server.append(self.servers.number(row.server))
        for one in row.completions:
            self._group.append(group)
            self._tokens.append(one.spans[-1][2] if one.spans else 0)
            self._oldest.append(one.spans[0][0] if one.spans else 0)
            self._newest.append(one.spans[-1][0] if one.spans else 0)
            self._age.append(one.age)
            self._reward.append(float("nan") if one.reward is None else one.reward)
            self._finish.append(self.finishes.number(one.finish_reason))
        self._first.append(len(self._group))

    def select(self, wanted: SamplesQuery) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The groups with a completion that passes the filters, sorted, int64 [groups], and which completions pass,
        bool [completions]. Texts are not searched."""
        passing = self._passing(wanted)
        groups = np.unique(_column(self._group)[passing]).astype(np.int64)
        keys = self._sort_keys(wanted.sort)[groups]
        return groups[np.argsort(keys, kind="stable")], passing

    def _passing(self, wanted: SamplesQuery) -> npt.NDArray[np.bool_]:
        group, reward = _column(self._group), _column(self._reward)
        passing = np.ones(len(group), np.bool_)
        limits = (
            (reward, wanted.reward_min, wanted.reward_max),
            (self.ages(), wanted.age_min, wanted.age_max),
            (_column(self._newest), wanted.version_min, None),
            (_column(self._oldest), None, wanted.version_max),
        )
        for values, low, high in limits:
            if low is not None:
                passing &= values >= low
            if high is not None:
                passing &= values <= high
        if wanted.finish:
            passing &= _column(self._finish) == self.finishes.find(wanted.finish)
        if wanted.server:
            passing &= _column(self._server)[group] == self.servers.find(wanted.server)
        if wanted.state == "unverifiable":
            passing &= np.isnan(reward)
        if wanted.state in ("trained", "untrained") or wanted.step_min is not None or wanted.step_max is not None:
            passing &= self._trained_within(wanted)[group]
        return passing

    def _trained_within(self, wanted: SamplesQuery) -> npt.NDArray[np.bool_]:
        """Whether each group meets the filters on its state and on the step that trained it, bool [groups]."""
        steps = self.steps()
        if wanted.state == "untrained":
            return steps == UNTRAINED
        low = max(0, wanted.step_min or 0)
        return (steps >= low) & (steps <= (np.inf if wanted.step_max is None else wanted.step_max))

    def steps(self) -> npt.NDArray[np.int64]:
        """Step that trained each group, or UNTRAINED."""
        trained = self.trained
        return np.array([trained[seq]["step"] if seq in trained else UNTRAINED for seq in self._seq], np.int64)

    def ages(self) -> npt.NDArray[np.int64]:
        """Age of each completion's oldest token in the step that trained it. For an untrained group, its age when the
        group was finished."""
        steps, tokens = self.steps()[_column(self._group)], _column(self._tokens)
        return np.where((steps == UNTRAINED) | (tokens == 0), _column(self._age), steps - 1 - _column(self._oldest))

    def _sort_keys(self, sort: str) -> npt.NDArray[Any]:
        """The sort key of each group, ascending."""
        if sort in ("newest", "oldest"):
            return _column(self._time) * (1 if sort == "oldest" else -1)
        if sort == "step":
            steps = self.steps()
            return np.where(steps == UNTRAINED, np.iinfo(np.int64).max, steps)
        if sort == "age":
            return -self._per_group(self.ages(), np.maximum)
        if sort == "length":
            return -self._per_group(_column(self._tokens), np.maximum)
        reward = _column(self._reward)
        judged = ~np.isnan(reward)
        if sort == "spread":
            high = self._per_group(np.where(judged, reward, -np.inf), np.maximum)
            low = self._per_group(np.where(judged, reward, np.inf), np.minimum)
            return np.where(high >= low, low - high, 0.0)
        count = self._per_group(judged.astype(np.float64), np.add)
        return -self._per_group(np.where(judged, reward, 0.0), np.add) / np.maximum(count, 1)

    def _per_group(self, values: npt.NDArray[Any], fold: np.ufunc) -> npt.NDArray[Any]:
        """Reduce the values of each group's completions with `fold`; 0 for a group without completions."""
        first = _column(self._first)
        filled = first[1:] > first[:-1]
        folded = np.zeros(len(self), values.dtype)
        if filled.any():
            folded[filled] = fold.reduceat(values, first[:-1][filled])
        return folded

    def brief(self, group: int) -> dict[str, Any]:
        """The fields of a group in the list, without its texts."""
        first, end = self._first[group], self._first[group + 1]
        rewards = [None if value != value else value for value in self._reward[first:end]]
        facts = self.trained.get(self._seq[group], {})
        versions = [min(self._oldest[first:end], default=0), max(self._newest[first:end], default=0)]
        return {
            "id": f"{self.files.all[self._file[group]]}@{self._offset[group]}",
            "seq": self._seq[group],
            "server": self.servers.all[self._server[group]],
            "time_s": self._time[group],
            "step": facts.get("step"),
            "rewards": rewards,
            "tokens": list(self._tokens[first:end]),
            "age": facts["step"] - 1 - versions[0] if facts else max(self._age[first:end], default=0),
            "versions": versions,
        }

    def span_of(self, group: int) -> slice:
        """Slice of the group's completions among all completions of the run."""
        return slice(self._first[group], self._first[group + 1])

    def line(self, group: int) -> bytes:
        """The row of the group as it stands in its file."""
        with (self._folder / self.files.all[self._file[group]]).open("rb") as file:
            file.seek(self._offset[group])
            return file.read(self._size[group])

    def find(self, identity: str) -> int | None:
        """The group of an `id` that `brief` gave; None if there is none."""
        name, _, offset = identity.rpartition("@")
        if not offset.isdecimal() or len(offset) > 18:
            return None
        here = (_column(self._file) == self.files.find(name)) & (_column(self._offset) == int(offset))
        places = np.flatnonzero(here)
        return int(places[0]) if len(places) else None

    def facts(self) -> dict[str, Any]:
        """The values to filter by, and where completions have grown."""
        reward, newest = _column(self._reward), _column(self._newest)
        judged = reward[~np.isnan(reward)]
        return {
            "finishes": sorted(filter(None, self.finishes.all)),
            "servers": sorted(filter(None, self.servers.all)),
            "rewards": [float(judged.min()), float(judged.max())] if len(judged) else None,
            "age": int(self.ages().max(initial=0)),
            "versions": [int(min(self._oldest, default=0)), int(newest.max()) if len(newest) else 0],
            "steps": int(max((facts["step"] for facts in self.trained.values()), default=0)),
            "growth": self._growth(),
        }

    def _growth(self) -> dict[str, Any] | None:
        """The first group, in time, at which completions count as grown; None if they have not."""
        if len(self) < 2 * GROWTH_WINDOW:
            return None
        counts = np.maximum(np.diff(_column(self._first)), 1)
        order = np.argsort(_column(self._time), kind="stable")
        lengths = (self._per_group(_column(self._tokens).astype(np.float64), np.add) / counts)[order]
        means = np.convolve(lengths, np.full(GROWTH_WINDOW, 1 / GROWTH_WINDOW), "valid")
        grown = np.flatnonzero(means >= GROWTH * means[0])
        if not len(grown) or not means[0]:
            return None
        group = int(order[grown[0] + GROWTH_WINDOW - 1])
        return {**self.brief(group), "from_tokens": float(means[0]), "to_tokens": float(means[grown[0]])}


def _column(values: Sequence[Any]) -> npt.NDArray[Any]:
    """A copy as an array, because a column cannot grow while a view of it exists."""
    return np.array(values)
