"""Files that a rollout server writes about itself: samples for people to read, evaluations, and its timeline."""

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

WAITING_ROWS = 64
"""Most groups that wait to be written. Beyond it, on a disk that does not keep up, groups are left out."""


class RolloutLogger:
    """Writes samples/NAME.jsonl (the groups that `is_sampled` picks) and timeline/NAME.jsonl in the run folder.

    A thread makes and writes the rows of samples: thousands of tokens take milliseconds, which the server's event loop
    does not have. `tokenizer` gives the text of each token; without it rows have none.
    """

    def __init__(self, run_dir: Path, name: str, *, samples_every: int, tokenizer: Tokenizer | None = None) -> None:
        self._samples = JsonLines(run_dir / "samples" / f"{name}.jsonl")
        self._timeline = Timeline(run_dir / "timeline" / f"{name}.jsonl", name)
        self._timeline.instant(PROCESS_TRACK, STARTED, time.time())
        self._evaluations = run_dir / "evaluations" / f"{name}.jsonl"
        self._samples_every = samples_every
        self._pieces = TokenPieces(tokenizer) if tokenizer is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._waiting: deque[Future[None]] = deque()

    def group(self, group: Group, *, version: int) -> None:
        """Log a finished group. Ages are counted from `version`, the engine's version now.

        Raises what the thread met when it wrote an earlier one (OSError).
        """
        lengths = [sample.length for sample in group.samples]
        self._timeline.span(
            "generation",
            f"group {group.seq}",
            group.started_s,
            group.finished_s,
            version=group.admitted_version,
            tokens=sum(lengths),
            lengths=lengths,
            queued_s=round(min(sample.started_s for sample in group.samples) - group.started_s, 4),
            judged_s=round(group.finished_s - max(sample.finished_s for sample in group.samples), 4),
        )
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()
        if is_sampled(group.seq, self._samples_every) and len(self._waiting) < WAITING_ROWS:
            self._waiting.append(self._thread.submit(self._write, group, version))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Append to evaluations/NAME.jsonl: the fields of `Evaluation` and `time_s`, Unix seconds at its end."""
        with JsonLines(self._evaluations) as lines:
            lines.write({**msgspec.to_builtins(evaluation), "time_s": time.time()})

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[dict[str, float]]:
        """Write the time that the block takes to the timeline, with what the block puts into the dictionary."""
        started_s = time.time()
        facts: dict[str, float] = {}
        try:
            yield facts
        finally:
            self._timeline.span(track, name, started_s, time.time(), **facts)

    def wait(self, reason: str, started_s: float, ended_s: float) -> None:
        """Write to the timeline that the engine had room and waited. Both times are Unix seconds."""
        self._timeline.span("wait", reason, started_s, ended_s)

    def engine_note(self, note: str) -> None:
        """Write to the timeline, for the run's report, why the engine does not run as configured."""
        self._timeline.instant(PROCESS_TRACK, ENGINE_NOTE, time.time(), note=note)

    def contention(self, found: Contention) -> None:
        """Write to the timeline that this server's processes waited for processors."""
        self._timeline.span(CPU_TRACK, "waited", found.began_s, found.ended_s, waited_s=round(found.waited_s, 3))

    def close(self) -> None:
        """Write what waits, and close both files."""
        self._thread.shutdown(wait=True)
        self._samples.close()
        self._timeline.close()

    def _write(self, group: Group, version: int) -> None:
        self._samples.write(_sample_row(group, version, self._pieces))


def _sample_row(group: Group, version: int, pieces: TokenPieces | None) -> dict[str, object]:
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
        "completions": [_completion(sample, version, pieces) for sample in group.samples],
    }


def _completion(sample: Sample, version: int, pieces: TokenPieces | None) -> dict[str, object]:
    facts: dict[str, object] = {
        "text": sample.text,
        "reward": sample.reward,
        "rewards": sample.rewards,
        "unverifiable": sample.unverifiable,
        "finish_reason": sample.finish_reason,
        "spans": [[span.version, span.start, span.end] for span in sample.spans],
        "age": version - sample.oldest_version,
    }
    if sample.turns:
        facts["turns"] = [[turn.start, turn.end, turn.by_policy] for turn in sample.turns]
    if pieces is not None:
        facts["pieces"] = pieces.decode_each(sample.token_ids().tolist())
        facts["logprobs"] = (np.round(sample.token_logprobs().astype(np.float64), 4) + 0.0).tolist()  # no -0.0
    return facts
