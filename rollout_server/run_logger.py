"""Files that a rollout server writes about itself: samples for people to read, and its timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_grpo.telemetry.jsonl import JsonLines
from async_grpo.telemetry.timeline import Timeline
from async_grpo.wire import Group


class RolloutLogger:
    """Writes samples/NAME.jsonl (every `samples_every`-th group) and timeline/NAME.jsonl in the run folder."""

    def __init__(self, run_dir: Path, name: str, *, samples_every: int) -> None:
        self._samples = JsonLines(run_dir / "samples" / f"{name}.jsonl")
        self._timeline = Timeline(run_dir / "timeline" / f"{name}.jsonl", name)
        self._samples_every = samples_every
        self._groups = 0

    def group(self, group: Group, *, version: int) -> None:
        """Log a finished group. Ages are counted from `version`, the engine's version now."""
        self._timeline.span(
            "generation",
            f"group {group.seq}",
            group.started_s,
            group.finished_s,
            version=group.admitted_version,
            tokens=sum(len(sample.token_ids()) for sample in group.samples),
        )
        self._groups += 1
        if (self._groups - 1) % self._samples_every == 0:
            self._samples.write(_sample_row(group, version))

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        """Write the time that the block takes to the timeline."""
        started_s = time.time()
        try:
            yield
        finally:
            self._timeline.span(track, name, started_s, time.time())

    def wait(self, reason: str, started_s: float, ended_s: float) -> None:
        """Write to the timeline that the engine had room and waited. Both times are Unix seconds."""
        self._timeline.span("wait", reason, started_s, ended_s)

    def close(self) -> None:
        """Close both files."""
        self._samples.close()
        self._timeline.close()


def _sample_row(group: Group, version: int) -> dict[str, object]:
    """The row of the group (`telemetry.rows`), with versions, spans and the server that made it."""
    return {
        "seq": group.seq,
        "prompt": group.task.prompt,
        "answer": group.task.answer,
        "admitted_version": group.admitted_version,
        "inserted_version": version,
        "attempt": group.attempt,
        "server": group.server,
        "time_s": group.finished_s,
        "completions": [
            {
                "text": sample.text,
                "reward": sample.reward,
                "rewards": sample.rewards,
                "unverifiable": sample.unverifiable,
                "finish_reason": sample.finish_reason,
                "spans": [[span.version, span.start, span.end] for span in sample.spans],
                "age": version - sample.oldest_version,
            }
            for sample in group.samples
        ],
    }
