"""What the trainer asks of the machine it runs on."""

from __future__ import annotations

from typing import Any, Protocol

from async_grpo.errors import ConfigError


class Platform(Protocol):
    """One kind of accelerator (or none)."""

    name: str
    device: str
    """torch device of parameters and batches."""
    backend: str
    """torch.distributed backend."""

    def activate(self, threads: int) -> None:
        """Make this process ready, once, before anything imports megatron. Raises ConfigError."""
        ...

    def layer_spec(self, config: Any) -> Any:
        """The Megatron block spec (`TransformerBlockSubmodules`) for a `TransformerConfig`."""
        ...


def select_platform(name: str) -> Platform:
    """The platform of that name. Raises ConfigError for one that this version does not have."""
    if name != "cpu":
        raise ConfigError(
            f"trainer.platform is {name!r}, which is not available in this version. Set trainer.platform to cpu"
        )
    from trainer.platform.cpu import CpuPlatform

    return CpuPlatform()
