"""The bench of the weight plane: real publisher and receiver processes, shared memory, loopback.

- transfer   a whole model to one receiver, beside a plain TCP loop, gloo and a file (`rivals.py`)
- stall      how long the trainer stands still, beside one memcpy of the weights
- patches    what Adam leaves to send, and what encoding and decoding it takes
- fanout     four and eight receivers, through relays and straight from the trainer

The block has the shapes of a Qwen2.5 model (`model.py`). Everything shares one machine, so a relay
saves the trainer's egress but no time: what it spares is the network card of a machine of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.progress import Progress

from async_grpo.bench.figures import Figure
from async_grpo.bench.weights.fanout import fanout
from async_grpo.bench.weights.model import ModelSize
from async_grpo.bench.weights.patches import WARM_UP_STEPS, patches
from async_grpo.bench.weights.plane import WARM_UPS
from async_grpo.bench.weights.transfer import transfer

RECEIVERS = (4, 8)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured, on models of which size."""

    whole: ModelSize
    rounds: int
    part: ModelSize
    part_rounds: int


FULL = Effort(ModelSize(layers=27, vocab=151_936), 7, ModelSize(layers=4, vocab=8192), 5)
"""1.08 GB, the shapes of Qwen2.5-0.5B with three layers more; and 134 MB."""
QUICK = Effort(ModelSize(layers=1, vocab=512, hidden=448), 1, ModelSize(layers=1, vocab=512, hidden=448), 1)


async def measure(progress: Progress, *, quick: bool) -> list[Figure]:
    """All figures; `quick` only shows that the bench works."""
    effort = QUICK if quick else FULL

    def steps(what: str, total: int) -> Callable[[], None]:
        task = progress.add_task(what, total=total)
        return lambda: progress.advance(task)

    figures = await transfer(
        effort.whole, effort.rounds, steps("a whole model to one receiver", WARM_UPS + effort.rounds)
    )
    step = steps("patches", WARM_UP_STEPS + effort.part_rounds)
    figures += await patches(effort.part, effort.part_rounds, step)
    for receivers in RECEIVERS:
        step = steps(f"to {receivers} receivers", WARM_UPS + effort.part_rounds)
        figures += await fanout(effort.part, receivers, effort.part_rounds, step)
    return figures
