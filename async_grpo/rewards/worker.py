"""A verifier process: `python -m async_grpo.rewards.worker NAME ...`

    pool --Assignment--> stdin        one Score an item, in order        stdout --> pool

It waits for assignments on its standard input and ends when that closes. Whatever verifiers print
goes to standard error, so that it cannot disturb the answers.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from async_grpo.errors import ConfigError
from async_grpo.process import die_with_parent
from async_grpo.rewards.frames import Assignment, Hello, Score, pack, read_frame_blocking
from async_grpo.rewards.verifiers import Verifier, resolve_verifier


def main(names: Sequence[str]) -> int:
    """Serve until the pipe closes; 2 if a verifier cannot be had."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    requests, answers = _claim_pipes()
    try:
        verifiers = {name: resolve_verifier(name) for name in names}
    except ConfigError as error:
        answers.write(pack(Hello(error=str(error))))
        return 2
    answers.write(pack(Hello()))
    while (assignment := read_frame_blocking(requests, Assignment)) is not None:
        for completion, answer in assignment.items:
            answers.write(pack(_judge(verifiers, completion, answer)))
    return 0


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output for ourselves; prints of verifiers go to standard error."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, answers


def _judge(verifiers: Mapping[str, Verifier], completion: str, answer: str) -> Score:
    """All verifiers on one item; the first that fails is the answer."""
    scores: dict[str, float] = {}
    for name, verifier in verifiers.items():
        try:
            score = float(verifier(completion, answer))
        except Exception as error:
            return Score(scores={}, error=f"{name}: {type(error).__name__}: {error}"[:500])
        if not math.isfinite(score):
            return Score(scores={}, error=f"{name}: the score is {score}, not a finite number")
        scores[name] = score
    return Score(scores=scores)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
