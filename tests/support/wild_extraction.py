"""A reward function whose extraction does what the completion says."""

from __future__ import annotations

import os
import time

HANGS_S = 600.0


def score(completion: str, answer: str) -> float:
    """Always right: only the extraction is wild."""
    return 1.0


def extract(completion: str) -> object:
    """The completion in capital letters, or something that goes wrong."""
    match completion:
        case "raise":
            raise ValueError("no")
        case "number":
            return 3
        case "crash":
            os._exit(7)
        case "nothing":
            return None
        case "long":
            return "x" * 1001
        case "hang":
            time.sleep(HANGS_S)
    return completion.upper()


score.extract = extract  # type: ignore[attr-defined]
