"""How samples are made: `single_turn` is one prompt, one completion."""

from rollout_server.workflows.protocol import Workflow
from rollout_server.workflows.single_turn import SingleTurn

__all__ = ["SingleTurn", "Workflow"]
