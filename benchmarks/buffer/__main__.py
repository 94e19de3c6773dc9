"""The replay buffer: throughput and latency compared with a plain list, and transitions of a full buffer.

Producer processes send groups of 8 samples (276 KB) to a consumer process. Takes about three minutes.
"""

from benchmarks.buffer.bench import measure
from benchmarks.harness import main, make_parser

arguments = make_parser(__doc__)
arguments.add_argument("--url", help="server to measure (default: start one)")
arguments.add_argument(
    "--fsync",
    choices=("everysec", "always"),
    default="everysec",
    help="appendfsync of the server that the bench starts; a real run uses always",
)
arguments.add_argument("--truncated", action="store_true", help="also measure groups with sampling masks")
main("python -m benchmarks.buffer", arguments, measure)
