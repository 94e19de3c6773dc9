"""The programs of `async-grpo accept` with a fault that a device's packages could have.

    python -m tests.support.accept_faults FAULT --config ... --model ...     as the program of that side

Processes that the program starts import this module again, and have the fault too.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "ACCEPT_FAULT"


def raw_logprobs() -> None:
    """The engine reports log-probabilities of temperature 1, as vllm-ascend's sampler does."""
    from rollout_server.engines.vllm import compat, engine

    compat.LOGPROBS_MODE = engine.LOGPROBS_MODE = "raw_logprobs"


def stale_head() -> None:
    """A tied output layer keeps its packed weights through an update."""
    from rollout_server.engines.vllm import reload

    reload.refresh_tied_head = lambda model: None


def blind_check() -> None:
    """The engine's check of weight updates accepts any gap as rounding."""
    from rollout_server.engines.vllm import update_check

    update_check.ROUNDING = {"float32": 1e9, "bfloat16": 1e9}
    update_check.SEPARABLE = 0.0


def dropped_float64() -> None:
    """all_reduce copies float64 to float32, reduces that and throws it away, as MindSpeed's does."""
    import torch
    import torch.distributed as dist

    original = dist.all_reduce

    def all_reduce(tensor, *arguments, **named):  # type: ignore[no-untyped-def]
        return original(tensor.float() if tensor.dtype == torch.float64 else tensor, *arguments, **named)

    dist.all_reduce = all_reduce


def main(name: str) -> None:
    os.environ[_VARIABLE] = name
    if name == "dropped_float64":
        from async_grpo.lab.accept import rank as program
    else:
        from async_grpo.lab.accept import engine as program  # type: ignore[no-redef]
    del sys.argv[1]
    program.main()


fault = os.environ.get(_VARIABLE) or sys.argv[1]
globals()[fault]()
if __name__ == "__main__":
    main(fault)
