"""Writes the files of a rollout server: samples for people to read, evaluations, and the timeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from async_grpo.data.tokenizer import Tokenizer, TokenPieces
from async_grpo.telemetry.contention import Contention
from async_grpo.telemetry.jsonl import JsonLines
from async_grpo.telemetry.rows import is_sampled
from async_grpo.telemetry.timeline import CPU_TRACK, ENGINE_NOTE, PROCESS_TRACK, STARTED, Timeline
from async_grpo.wire import Group, Sample
from async_grpo.wire.board import Evaluation

MAX_QUEUED_GROUPS = 64
"""Maximum groups queued for writing. If the disk does not keep up, further groups are left out."""


class RolloutLogger:
    """Writes NAME.jsonl in the folders samples (groups picked by `is_sampled`), evaluations and timeline of the run.

    A thread formats and writes the rows of samples: thousands of tokens take milliseconds, which would delay the
    server's event loop. Without `tokenizer`, rows lack the text of each token.
    """

    def __init__(self, run_dir: Path, name: str, *, samples_every: int, tokenizer: Tokenizer | None = None) -> None:
        self._samples = JsonLines(run_dir / "samples" / f"{name}.jsonl")
        self._timeline = Timeline(run_dir / "timeline" / f"{name}.jsonl", name)
        self._timeline.instant(PROCESS_TRACK, STARTED, time.time())
        self._evaluations = run_dir / "evaluations" / f"{name}.jsonl"
        self._samples_every = samples_every
        self._pieces = TokenPieces(tokenizer) if tokenizer is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._pending: deque[Future[None]] = deque()
        """Writes of sample rows that are queued or not checked for errors yet, oldest first."""

    def record_group(self, group: Group, *, version: int) -> None:
        """Write a finished group. Ages count from `version`, the engine's current version.

        Raises the error of an earlier write by the thread (OSError).
        """
        lengths = [sample.length for sample in group.samples]
        first_started_s = min(sample.started_s for sample in group.samples)
        last_finished_s = max(sample.finished_s for sample in group.samples)
        self._timeline.span(
            "generation",
            f"group {group.seq}",
            group.started_s,
            group.finished_s,
            version=group.admitted_version,
            tokens=sum(lengths),
            lengths=lengths,
            queued_s=round(first_started_s - group.started_s, 4),
            judged_s=round(group.finished_s - last_finished_s, 4),
        )

        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if is_sampled(group.seq, self._samples_every) and len(self._pending) < MAX_QUEUED_GROUPS:
            self._pending.append(self._thread.submit(self._write_samples, group, version))

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Append the fields of `Evaluation` to evaluations/NAME.jsonl, with `time_s`: Unix seconds at its end."""
        with JsonLines(self._evaluations) as lines:
            lines.write({**msgspec.to_builtins(evaluation), "time_s": time.time()})

    @contextmanager
    def record_span(self, track: str, name: str) -> Iterator[dict[str, float]]:
        """Write the duration of the block to the timeline, with the fields that the block adds to the dictionary."""
        started_s = time.time()
        fields: dict[str, float] = {}
        try:
            yield fields
        finally:
            self._timeline.span(track, name, started_s, time.time(), **fields)

    def record_wait(self, reason: str, started_s: float, ended_s: float) -> None:
        """Write to the timeline that the engine had free slots and waited. Both times are Unix seconds."""
        self._timeline.span("wait", reason, started_s, ended_s)

    def record_engine_note(self, note: str) -> None:
        """Write to the timeline, for the run's report, why the engine does not run as configured."""
        self._timeline.instant(PROCESS_TRACK, ENGINE_NOTE, time.time(), note=note)

    def record_contention(self, contention: Contention) -> None:
        """Write to the timeline that this server's processes waited for processors."""
        waited_s = round(contention.wait_s, 3)
        self._timeline.span(CPU_TRACK, "waited", contention.start_s, contention.end_s, waited_s=waited_s)

    def close(self) -> None:
        """Write the queued groups, and close both files."""
        self._thread.shutdown(wait=True)
        self._samples.close()
        self._timeline.close()

    def _write_samples(self, group: Group, version: int) -> None:
        self._samples.write(_group_row(group, version, self._pieces))


def _group_row(group: Group, version: int, pieces: TokenPieces | None) -> dict[str, object]:
    """Row of a group in the format of `telemetry.rows`."""
    return {
        "seq": group.seq,
        "prompt": group.task.prompt,
        "answer": group.task.answer,
        "admitted_version": group.admitted_version,
        "inserted_version": version,
        "attempt": group.attempt,
        "server": group.server,
        "time_s": group.finished_s,
        "completions": [_completion_fields(sample, version, pieces) for sample in group.samples],
    }


def _completion_fields(sample: Sample, version: int, pieces: TokenPieces | None) -> dict[str, object]:
    fields: dict[str, object] = {
        "text": sample.text,
        "reward": sample.reward,
        "rewards": sample.rewards,
        "unverifiable": sample.unverifiable,
        "finish_reason": sample.finish_reason,
        "spans": [[span.version, span.start, span.end] for span in sample.spans],
        "age": version - sample.oldest_version if sample.spans else 0,  # a failed sample may have no tokens
    }
    if sample.turns:
        fields["turns"] = [[turn.start, turn.end, turn.by_policy] for turn in sample.turns]
    if pieces is not None:
        fields["pieces"] = pieces.decode_each(sample.token_ids().tolist())
        rounded = np.round(sample.token_logprobs().astype(np.float64), 4)
        fields["logprobs"] = (rounded + 0.0).tolist()  # adding 0.0 turns -0.0 into 0.0
    return fields
