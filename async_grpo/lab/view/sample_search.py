"""Pages of groups, filtered and sorted by the index, with a search of their texts within a time budget.

A page ends after `limit` groups or SEARCH_S seconds. Its `next` is where to continue, so a search answers quickly
regardless of the number of samples, and can be continued or abandoned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import regex
from fastapi import APIRouter, HTTPException, Query

from async_grpo.lab.view.recent_runs import RecentRuns
from async_grpo.lab.view.sample_index import SampleIndex, SamplesQuery

SEARCH_S = 1.0
"""Maximum seconds of searching per request."""
INDEX_S = 0.25
"""Maximum seconds of indexing per request."""
MATCH_S = 0.05
"""Maximum seconds of a pattern on one text."""
SNIPPET_LENGTH = 160
"""Characters of a text that the list shows."""

FindMatch = Callable[[str], tuple[int, int] | None]
"""text -> [start, end) of the first match."""


class _Text(msgspec.Struct):
    text: str = ""


class _Texts(msgspec.Struct):
    prompt: str = ""
    answer: str = ""
    completions: list[_Text] = []


class RunSamples:
    """The samples of one run folder. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._lock = threading.Lock()
        self._index = SampleIndex(run_dir)
        self._decode = msgspec.json.Decoder(_Texts).decode

    def search(self, query: SamplesQuery) -> dict[str, Any]:
        """Return a page of groups. Raises ValueError for an invalid pattern."""
        find_match = make_matcher(query.q, query.regex)
        with self._lock:
            indexed = self._index.read_new_lines(INDEX_S)
            groups, passing = self._index.select_groups(query)
            until = time.monotonic() + SEARCH_S
            position = query.start
            items: list[dict[str, Any]] = []
            while position < len(groups) and len(items) < query.limit and time.monotonic() < until:
                group = int(groups[position])
                position += 1
                item = self._make_item(group, passing[self._index.completion_slice(group)], query.within, find_match)
                if item is not None:
                    items.append(item)

            page: dict[str, Any] = {
                "indexed": indexed,
                "groups": len(self._index),
                "completions": self._index.completions,
                "matching": len(groups),
                "unreadable": self._index.unreadable,
                "searched": position,
                "next": position if position < len(groups) else None,
                "items": items,
            }
            if query.start == 0:
                page["facts"] = self._index.filter_options()
            return page

    def _make_item(self, group: int, passing: Any, within: str, find_match: FindMatch | None) -> dict[str, Any] | None:
        """Return the group's item in the list; None if the search finds nothing in it.

        `matches` of the item are the completions that pass the filter and contain the text. If only the prompt contains
        it, they are all that pass.
        """
        texts = self._decode(self._index.read_line(group))
        item = self._index.group_entry(group)
        item["prompt"] = texts.prompt[:SNIPPET_LENGTH]
        item["answer"] = texts.answer[:SNIPPET_LENGTH]
        item["matches"] = [index for index, passes in enumerate(passing) if passes]
        if find_match is None:
            return item

        is_in_prompt = within != "completion" and find_match(texts.prompt) is not None
        matches: dict[int, tuple[int, int]] = {}
        if within != "prompt":
            for index in item["matches"]:
                match = find_match(texts.completions[index].text)
                if match is not None:
                    matches[index] = match
        if matches:
            item["matches"] = list(matches)
            first = item["matches"][0]
            item["snippet"] = _cut_snippet(texts.completions[first].text, *matches[first])
        elif not is_in_prompt:
            return None
        return item

    def read_group(self, identity: str) -> dict[str, Any] | None:
        """Return all data of a group; None if no group has this identity."""
        with self._lock:
            self._index.read_new_lines(INDEX_S)
            group = self._index.find_group(identity)
            if group is None:
                return None
            row = msgspec.json.decode(self._index.read_line(group))
            return {"id": identity, "row": row, "trained": self._index.trained.get(row["seq"])}


def make_matcher(text: str, is_regex: bool) -> FindMatch | None:
    """Return a function that finds the text, as a regular expression or literally and ignoring case.

    None for an empty text. Raises ValueError for an invalid pattern.
    """
    if not text:
        return None
    try:
        pattern = regex.compile(text) if is_regex else regex.compile(regex.escape(text), regex.IGNORECASE)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from error

    def find_match(searched: str) -> tuple[int, int] | None:
        # A pattern with nested repetitions can take exponential time. The module `re` has no time limit.
        try:
            match = pattern.search(searched, timeout=MATCH_S)
        except TimeoutError:
            return None
        return None if match is None else match.span()

    return find_match


def _cut_snippet(text: str, start: int, end: int) -> list[str]:
    """Return the text before, in and after a match, shortened for the list."""
    before = max(0, start - SNIPPET_LENGTH // 4)
    matched = text[start : min(end, start + SNIPPET_LENGTH)]
    return [text[before:start], matched, text[start + len(matched) : start + SNIPPET_LENGTH]]


def sample_routes(find_run: Callable[[str], Path]) -> APIRouter:
    """Return the routes of samples. `find_run` returns the folder of a run's id, or raises HTTPException."""
    routes = APIRouter()
    runs = RecentRuns(RunSamples)

    def samples_of(name: str) -> RunSamples:
        return runs.get_run(find_run(name))

    @routes.get("/api/runs/{name}/samples")
    def samples(name: str, query: Annotated[SamplesQuery, Query()]) -> dict[str, Any]:
        """Return a page of groups."""
        try:
            return samples_of(name).search(query)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    @routes.get("/api/runs/{name}/samples/{identity}")
    def group(name: str, identity: str) -> dict[str, Any]:
        """Return one group with all its tokens."""
        sample = samples_of(name).read_group(identity)
        if sample is None:
            raise HTTPException(404, f"run {name} has no group {identity}: its samples may have been removed")
        return sample

    return routes
