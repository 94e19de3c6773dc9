"""Optimizer steps that produce realistic weight changes.

The weights are an fp32 master updated by torch's AdamW, rounded to bfloat16. Gradients are noise, which is the hard
case: real gradients agree more from step to step, and many are zero.
"""

from __future__ import annotations

from async_grpo.config.trainer import OptimizerConfig
from async_grpo.errors import DependencyError
from async_grpo.weights.manifest import TensorLayout
from benchmarks.weights.plane import Weights

TIMED_LR = 1e-6
"""Learning rate of the timed steps: the default of `trainer.optimizer.lr`."""
INITIAL_STD = 0.02


class Training:
    """A flat fp32 master under AdamW with random gradients. `weights` is its bfloat16 copy."""

    def __init__(self, layout: TensorLayout) -> None:
        """Raises DependencyError without torch."""
        try:
            import torch
        except ImportError as error:
            raise DependencyError(
                "the benchmark of the weights needs torch. pip install 'async-grpo[trainer]'"
            ) from error
        self.weights = Weights(layout)
        self._generator = torch.Generator().manual_seed(0)
        self._copy = torch.from_numpy(self.weights.flat).view(torch.bfloat16)
        self._master = INITIAL_STD * torch.randn(self._copy.shape, generator=self._generator)
        self._master.grad = torch.empty_like(self._master)
        config = OptimizerConfig()
        self._adam = torch.optim.AdamW(
            [self._master],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=False,
        )

    def step(self, lr: float) -> None:
        """Take one optimizer step and update the bfloat16 copy."""
        assert self._master.grad is not None
        self._master.grad.normal_(generator=self._generator)
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self._copy.copy_(self._master)
