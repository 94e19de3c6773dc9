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

SEARCH_S, INDEX_S, MATCH_S = 1.0, 0.25, 0.05
"""Time limits in seconds: for searching in a request, for indexing in a request, and for a pattern on one text."""
SNIPPET = 160
"""Characters of a text that a list shows."""

Matches = Callable[[str], tuple[int, int] | None]
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

    def page(self, query: SamplesQuery) -> dict[str, Any]:
        """A page of groups. Raises ValueError for an invalid pattern."""
        matches = matcher(query.q, query.regex)
        with self._lock:
            indexed = self._index.update(INDEX_S)
            groups, passing = self._index.select(query)
            until, at = time.monotonic() + SEARCH_S, query.start
            items: list[dict[str, Any]] = []
            while at < len(groups) and len(items) < query.limit and time.monotonic() < until:
                group = int(groups[at])
                at += 1
                if (item := self._item(group, passing[self._index.span_of(group)], query.within, matches)) is not None:
                    items.append(item)
            return {
                "indexed": indexed,
                "groups": len(self._index),
                "completions": self._index.completions,
                "matching": len(groups),
                "unreadable": self._index.unreadable,
                "searched": at,
                "next": at if at < len(groups) else None,
                "items": items,
                **({"facts": self._index.facts()} if query.start == 0 else {}),
            }

    def _item(self, group: int, passing: Any, within: str, matches: Matches | None) -> dict[str, Any] | None:
        """The group's item in the list, with the completions that pass the filter and match; None if none does."""
        texts = self._decode(self._index.line(group))
        places = [place for place, passes in enumerate(passing) if passes]
        snippet = {}
        if matches is not None:
            in_prompt = within != "completion" and matches(texts.prompt) is not None
            hits = {} if within == "prompt" else {at: matches(texts.completions[at].text) for at in places}
            found = {at: hit for at, hit in hits.items() if hit is not None}
            if not in_prompt and not found:
                return None
            places = list(found) or places
            if found:
                snippet = {"snippet": _around(texts.completions[places[0]].text, *found[places[0]])}
        shown = {"prompt": texts.prompt[:SNIPPET], "answer": texts.answer[:SNIPPET], "matches": places}
        return {**self._index.brief(group), **shown, **snippet}

    def group(self, identity: str) -> dict[str, Any] | None:
        """All data of a group; None if no group has this identity."""
        with self._lock:
            self._index.update(INDEX_S)
            group = self._index.find(identity)
            if group is None:
                return None
            row = msgspec.json.decode(self._index.line(group))
            return {"id": identity, "row": row, "trained": self._index.trained.get(row["seq"])}


def matcher(text: str, is_regex: bool) -> Matches | None:
    """A function that finds the text, as a regular expression or literally and ignoring case; None for an empty text.
    Raises ValueError for an invalid pattern."""
    if not text:
        return None
    try:
        pattern = regex.compile(text) if is_regex else regex.compile(regex.escape(text), regex.IGNORECASE)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from error

    def search(in_text: str) -> tuple[int, int] | None:
        try:
            found = pattern.search(in_text, timeout=MATCH_S)
        except TimeoutError:
            return None
        return None if found is None else found.span()

    return search


def _around(text: str, start: int, end: int) -> list[str]:
    """The text before, in and after a match, shortened for the list."""
    before = max(0, start - SNIPPET // 4)
    matched = text[start : min(end, start + SNIPPET)]
    return [text[before:start], matched, text[start + len(matched) : start + SNIPPET]]


def sample_routes(find_run: Callable[[str], Path]) -> APIRouter:
    """The routes of samples. `find_run` gives the folder of a run's name, or raises HTTPException."""
    routes = APIRouter()
    runs = RecentRuns(RunSamples)

    def samples_of(name: str) -> RunSamples:
        return runs.get_run(find_run(name))

    @routes.get("/api/runs/{name}/samples")
    def samples(name: str, query: Annotated[SamplesQuery, Query()]) -> dict[str, Any]:
        """A page of groups."""
        try:
            return samples_of(name).page(query)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    @routes.get("/api/runs/{name}/samples/{identity}")
    def group(name: str, identity: str) -> dict[str, Any]:
        """One group with all its tokens."""
        found = samples_of(name).group(identity)
        if found is None:
            raise HTTPException(404, f"run {name} has no group {identity}: its samples may have been removed")
        return found

    return routes
