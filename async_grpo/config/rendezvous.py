"""Where the machines of a trainer meet."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_grpo.config.base import Seconds, StrictModel


class RendezvousConfig(StrictModel):
    """With trainer.nodes above 1; the same on every node."""

    address: Annotated[str, Field(pattern=r"^[^\s:/]+$")] | None = None
    """Of node 0, as all nodes reach it. Node 0 listens there and nowhere else."""
    port: Annotated[int, Field(gt=0, lt=65535)] = 29500
    """Here the nodes meet; on the next one the ranks do."""
    id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Nodes of another id are turned away. None: the name of the run."""
    timeout_s: Seconds = 600.0
    """How long a node waits for the others before it ends with an error."""
    silence_s: Annotated[float, Field(ge=2)] = 20.0
    """A node that is not heard for so long is taken for lost, and the others end."""
