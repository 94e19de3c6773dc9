"""Weights that move as an optimizer moves them: an fp32 master under torch's AdamW, rounded to bfloat16."""

from __future__ import annotations

from async_grpo.bench.weights.model import Weights
from async_grpo.config.trainer import OptimizerConfig
from async_grpo.errors import DependencyError
from async_grpo.weights.manifest import Layout

INITIAL_STD = 0.02


class Training:
    """One flat master; `weights` is its bfloat16 image. Gradients are noise."""

    def __init__(self, layout: Layout) -> None:
        """Raises DependencyError without torch."""
        try:
            import torch
        except ImportError as error:
            raise DependencyError(
                "the bench of the weights trains with torch. Type: pip install 'async-grpo[trainer]'"
            ) from error
        self.weights = Weights(layout)
        self._generator = torch.Generator().manual_seed(0)
        self._image = torch.from_numpy(self.weights.flat).view(torch.bfloat16)
        self._master = INITIAL_STD * torch.randn(self._image.shape, generator=self._generator)
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
        """One optimizer step; the image follows."""
        assert self._master.grad is not None
        self._master.grad.normal_(generator=self._generator)
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self._image.copy_(self._master)
