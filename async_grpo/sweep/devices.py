"""Several runs at once on one machine: no accelerator belongs to two of them.

A run that is alone gets whatever `async-grpo run` would; several at once each get a share, in the environment variable
from which `async_grpo.launch.devices` deals on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from async_grpo.config import RunConfig
from async_grpo.devices import TOOLS, VISIBLE, devices_of, visible
from async_grpo.errors import ConfigError
from async_grpo.launch.devices import deal_devices


def devices_wanted(config: RunConfig) -> tuple[str, int]:
    """Platform and count of the accelerators of a run: ("", 0) where it needs none. Raises ConfigError."""
    shown = [own for own in deal_devices(config, {}).values() if own]
    for platform, variable in VISIBLE.items():
        counts = [len([part for part in own[variable].split(",") if part]) for own in shown if variable in own]
        if sum(counts):
            return platform, sum(counts)
    return "", 0


def devices_here(platform: str, environment: Mapping[str, str]) -> list[str]:
    """The accelerators that runs may use, as the environment names them. Raises ConfigError if nobody knows."""
    named = visible(platform, environment)
    found = named if named is not None else [str(device.index) for device in devices_of(platform)]
    if not found:
        raise ConfigError(
            f"--at-once above 1 needs to know the devices to share out, but {VISIBLE[platform]} is not set and "
            f"{TOOLS[platform]} finds none. Set {VISIBLE[platform]}, or leave --at-once out"
        )
    return found


@dataclass(slots=True)
class DevicePool:
    """Accelerators of one platform; those that are taken come back."""

    platform: str
    free: list[str]
    _taken: dict[str, list[str]] = field(default_factory=dict)

    def take(self, run: str, count: int) -> dict[str, str] | None:
        """The environment that shows a run its own; None if too few are free."""
        if count > len(self.free):
            return None
        if not count:
            return {}
        self._taken[run], self.free = self.free[:count], self.free[count:]
        return {VISIBLE[self.platform]: ",".join(self._taken[run])}

    def give_back(self, run: str) -> None:
        """What the run had, if anything."""
        self.free = [*self.free, *self._taken.pop(run, [])]


def pool_for(configs: Sequence[RunConfig], at_once: int, environment: Mapping[str, str]) -> DevicePool | None:
    """None where nothing has to be shared out. Raises ConfigError if a run needs more than there is."""
    wanted = [devices_wanted(config) for config in configs]
    platforms = {platform for platform, count in wanted if count}
    if at_once == 1 or not platforms:
        return None
    if len(platforms) > 1:
        raise ConfigError(f"points on {' and '.join(sorted(platforms))}: sweep them one at a time (without --at-once)")
    (platform,) = platforms
    here, most = devices_here(platform, environment), max(count for _, count in wanted)
    if most > len(here):
        raise ConfigError(f"a point of this sweep needs {most} devices, and there are {len(here)}: {', '.join(here)}")
    return DevicePool(platform, here)
