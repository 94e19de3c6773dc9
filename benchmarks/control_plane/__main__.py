"""The control plane: many rollout servers whose engines replay timings, over a real Valkey.

Groups per second beside the same engines alone, latencies of admission and announcements, and what a group costs
Valkey. Takes about twelve minutes.
"""

import argparse
from pathlib import Path

from benchmarks.control_plane.bench import measure, view
from benchmarks.harness import main, parser


def numbers(text: str) -> list[int]:
    """The whole numbers of a list with commas. Raises ArgumentTypeError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers above 0 with commas between")
    return [int(word) for word in words]


def at_least_1(text: str) -> float:
    """A number from 1 on. Raises ArgumentTypeError."""
    number = float(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


arguments = parser(__doc__)
arguments.add_argument(
    "--servers", type=numbers, default=[64, 256, 1000], metavar="64,256,1000", help="numbers of servers"
)
arguments.add_argument(
    "--faster",
    type=numbers,
    default=[4, 16, 64],
    metavar="4,16,64",
    help="token-speed multipliers to try with the smallest number of servers",
)
arguments.add_argument("--seconds", type=at_least_1, default=30.0, help="how long each round is observed")
arguments.add_argument(
    "--token-ms",
    type=at_least_1,
    default=40.0,
    help="milliseconds of a token with all slots busy, unless a run is replayed",
)
arguments.add_argument(
    "--from", dest="source", type=Path, metavar="RUN", help="replay lengths and token times of this run"
)
arguments.add_argument("--write-timings", type=Path, metavar="FILE", help="write the costs for async-grpo simulate")
main("python -m benchmarks.control_plane", arguments, measure, view)
