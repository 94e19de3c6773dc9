"""A GPTModel whose output layer reads only the positions that are trained.

Predictions of prompt tokens and of the environment's have no loss; of math problems they are a third of all, and the
vocabulary is the widest matrix of a model. What is left out would be multiplied by 0, so nothing changes but the time.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from trainer.model.spec import PackedSequences


class TrainedPositionsModel(GPTModel):
    """On the last pipeline stage: logits [1, M, V] of the M positions `packed_seq_params.trained`."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedSequences, **kwargs: Any) -> Any:
        """hidden_states [T, 1, H]; with sequence parallelism T is cut over the ranks, and the output layer joins it."""
        scattered, trained_M = self.config.sequence_parallel, packed_seq_params.trained
        if self.post_process and not scattered:
            hidden_states = hidden_states.index_select(0, trained_M)
        output = super()._postprocess(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)
        return output.index_select(1, trained_M) if self.post_process and scattered else output
