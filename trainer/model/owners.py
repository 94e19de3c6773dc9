"""Which ranks have a part of a tensor, and which one of them sends it to rank 0 when the model is exported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True, slots=True)
class Seat:
    """Of a rank in the layout. Replicas of a tensor are counted apart for experts, which other ranks share."""

    stage: int
    tensor: int
    replica: int
    expert: int
    expert_replica: int


@dataclass(frozen=True, slots=True)
class Owners:
    """The seats of all ranks, seen from `rank`."""

    rank: int
    seats: tuple[Seat, ...]

    def source(self, stage: int, holder: int | None) -> int:
        """The rank that ends up with the whole tensor; `holder` as in `Weight`."""
        return next(
            rank
            for rank, seat in enumerate(self.seats)
            if self._first(seat, stage, holder) and (holder is not None or seat.tensor == 0)
        )

    def has_part(self, stage: int, holder: int | None) -> bool:
        """Whether this rank takes part in gathering it: its first replica does."""
        return self._first(self.seats[self.rank], stage, holder)

    @staticmethod
    def _first(seat: Seat, stage: int, holder: int | None) -> bool:
        if seat.stage != stage:
            return False
        return seat.replica == 0 if holder is None else (seat.expert, seat.expert_replica) == (holder, 0)


def find_owners() -> Owners:
    """All ranks ask together."""
    seat = [
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    ]
    seats = [torch.empty(len(seat), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(seats, torch.tensor(seat))
    return Owners(dist.get_rank(), tuple(Seat(*found.tolist()) for found in seats))
