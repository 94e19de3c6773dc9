"""The control plane: many rollout servers with replayed engines, over a real Valkey.

Groups per second compared with the same engines alone, latencies of admission and announcements, and Valkey's cost per
group. Takes about twelve minutes.
"""

import argparse
from pathlib import Path

from benchmarks.control_plane.bench import measure, render
from benchmarks.harness import main, make_parser


def parse_numbers(text: str) -> list[int]:
    """Parse a comma-separated list of positive integers. Raises ArgumentTypeError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} must be a comma-separated list of integers above 0")
    return [int(word) for word in words]


def parse_at_least_1(text: str) -> float:
    """Parse a number of at least 1. Raises ArgumentTypeError."""
    number = float(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


arguments = make_parser(__doc__)
arguments.add_argument(
    "--servers", type=parse_numbers, default=[64, 256, 1000], metavar="64,256,1000", help="numbers of servers"
)
arguments.add_argument(
    "--faster",
    type=parse_numbers,
    default=[4, 16, 64],
    metavar="4,16,64",
    help="token-speed multipliers to try with the smallest number of servers",
)
arguments.add_argument("--seconds", type=parse_at_least_1, default=30.0, help="seconds of observation per round")
arguments.add_argument(
    "--token-ms",
    type=parse_at_least_1,
    default=40.0,
    help="milliseconds per token with all slots busy (ignored with --from)",
)
arguments.add_argument(
    "--from", dest="source", type=Path, metavar="RUN", help="replay the completion lengths and token times of this run"
)
arguments.add_argument("--write-timings", type=Path, metavar="FILE", help="write the costs for async-grpo simulate")
main("python -m benchmarks.control_plane", arguments, measure, render)
