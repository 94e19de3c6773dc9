"""Weight transfer: updating an engine while it generates; a whole model compared with a TCP loop, gloo and a file;
patches; a folder or bucket; relays; the trainer's stall with two and four ranks.

Updates a vLLM engine with 56 million random parameters, sends 1.08 GB with the shapes of Qwen2.5-0.5B, and 3.09 GB from
several ranks to two engines. Needs 21 GB of free memory and takes about ten minutes.
"""

from benchmarks.harness import main, make_parser
from benchmarks.weights.bench import measure

arguments = make_parser(__doc__)
arguments.add_argument(
    "--bucket", metavar="URL", help="also send versions through this bucket: s3://BUCKET/PREFIX, gs://, az://"
)
arguments.add_argument(
    "--engine",
    choices=("cpu", "cuda", "ascend", "none"),
    default="cpu",
    help="platform of the engine to update; none: skip the engine (needs no vLLM)",
)
main("python -m benchmarks.weights", arguments, measure)
