"""The parts that all simulated roles share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from async_grpo.lab.simulate.events import EventLoop
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.timings import Timings


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """Settings and timings of the simulated run, its clock, and its only source of random numbers."""

    settings: SimulatedSettings
    timings: Timings
    events: EventLoop
    generator: np.random.Generator

    def draw_noise(self, variation: float) -> float:
        """Draw a positive factor with mean 1 and standard deviation `variation`."""
        if variation == 0:
            return 1.0
        shape = 1 / variation**2
        return float(self.generator.gamma(shape, 1 / shape))
