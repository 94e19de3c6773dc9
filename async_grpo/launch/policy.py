"""What to do when a role has ended: a pure decision."""

from __future__ import annotations

from enum import Enum

from async_grpo.errors import EXIT_CONFIG


class Decision(Enum):
    """What follows the end of a role."""

    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give up"


def decide(*, code: int, stopping: bool, over: bool, needed: bool, restarts: int, limit: int) -> Decision:
    """The policy.

    stopping: the supervisor asked for this end. over: nothing is left for this role to do. needed: the run cannot
    finish without this role. restarts: how often this invocation has restarted it; limit: how often it may be.

    An exit code of 0 is a role that left on purpose; it comes back only if the run needs it. Once there is nothing left
    to do, any end is final. A role that ends with EXIT_CONFIG would end so again.
    """
    if stopping or over or (code == 0 and not needed):
        return Decision.DONE
    return Decision.RESTART if restarts < limit and code != EXIT_CONFIG else Decision.GIVE_UP
