"""A simulated engine: samples that share its decoding steps, on a clock of tokens.

All running samples get a token in every decoding step, so one number is enough: `position`, the tokens that each of
them would have if it had run from the start. A sample that needs n more tokens ends at position + n, regardless of
which samples join or leave. Only the time at which the engine reaches that position changes:

    d position / dt  =  1 / (slowdown * (step_s + request_s * running + context_s * tokens in the cache))

It is 0 while the engine is blocked, to read a prompt or to load weights. The positions at which the version changed
give the version of each token.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator

from async_grpo.lab.simulate.timings import EngineTimings

_ROUNDING_TOKENS = 1e-6
"""Positions this close are equal: the position is a sum of rounded parts."""


class SimulatedSample:
    """An unfinished or finished completion. It may run in several parts, on several engines."""

    __slots__ = ("end_position", "group", "is_running", "remaining", "start_position", "tokens_by_version")

    def __init__(self, group: object, length: float) -> None:
        self.group = group
        self.remaining = length
        """Tokens missing at the start of the current part, or now if it does not run."""
        self.tokens_by_version: dict[int, float] = {}
        """Tokens of the parts that have ended."""
        self.is_running = False
        self.start_position = 0.0
        """Position of the engine at the start of the current part."""
        self.end_position = 0.0
        """Position at which the sample has its last token."""

    @property
    def generated_tokens(self) -> float:
        """Tokens of the parts that have ended."""
        return sum(self.tokens_by_version.values())


class SimulatedEngine:
    """One engine. Methods take the present time and advance the engine to it first."""

    def __init__(self, timings: EngineTimings, *, prompt_tokens: float) -> None:
        self._timings = timings
        self._prompt_tokens = prompt_tokens
        self.version = 0
        self.running = 0
        """Number of running samples."""
        self.position = 0.0
        self.slowdown = 1.0
        """Factor by which decoding is slower than alone on the machine."""
        self.busy_s = 0.0
        """Seconds in which at least one sample was running."""
        self.generated_tokens = 0.0
        """Tokens of all samples."""
        self._now_s = 0.0
        self._blocked_until_s = 0.0
        self._step_s = timings.step_s
        """Seconds of a decoding step at `position`."""
        self._step_growth_s = 0.0
        """Seconds by which each step is longer than the one before, because the context grows."""
        self._context_base = 0.0
        """Tokens in the cache, less `running * position`. Constant while the same samples run."""
        self._ends: list[tuple[float, int, SimulatedSample]] = []
        """Heap of end position, start number and sample. Entries of stopped samples stay until they are at the top."""
        self._starts = 0
        self._version_positions: list[float] = [0.0]
        """Positions at which the version changed; `_versions` holds the versions."""
        self._versions: list[int] = [0]

    @property
    def context_tokens(self) -> float:
        """Tokens in the KV cache."""
        return self._context_base + self.running * self.position

    def start_sample(self, now_s: float, sample: SimulatedSample, *, prompt: float) -> None:
        """Run a sample. Tokens of its earlier parts are prefilled again.

        `prompt` is the fraction of its prompt's prefill time to spend, 0 if the prompt is in the prefix cache.
        """
        self.advance_to(now_s)
        prefix = sample.generated_tokens
        self.block(now_s, self._timings.prefill_s * (prefix + self._prompt_tokens * prompt))

        sample.is_running = True
        sample.start_position = self.position
        sample.end_position = self.position + sample.remaining
        self._starts += 1
        heapq.heappush(self._ends, (sample.end_position, self._starts, sample))

        self.running += 1
        self._context_base += self._prompt_tokens + prefix - self.position
        self._update_step_time()

    def stop_sample(self, now_s: float, sample: SimulatedSample, *, lost_tokens: float = 0.0) -> None:
        """Stop a running sample. It keeps the tokens that it has, except the last `lost_tokens`."""
        self.advance_to(now_s)
        self._remove_sample(sample, max(sample.start_position, self.position - lost_tokens))

    def collect_finished(self, now_s: float) -> list[SimulatedSample]:
        """Remove and return the samples that have their last token."""
        self.advance_to(now_s)
        finished: list[SimulatedSample] = []
        ends = self._ends
        while ends and (ends[0][0] <= self.position + _ROUNDING_TOKENS or not self._is_current(ends[0])):
            entry = heapq.heappop(ends)
            if self._is_current(entry):
                end_position, _, sample = entry
                self._remove_sample(sample, end_position)
                finished.append(sample)
        return finished

    def next_end_s(self) -> float:
        """Time at which the next sample ends if nothing changes until then; inf if none runs."""
        ends = self._ends
        while ends and not self._is_current(ends[0]):
            heapq.heappop(ends)
        if not ends:
            return math.inf
        tokens = max(0.0, ends[0][0] - self.position)
        return max(self._now_s, self._blocked_until_s) + tokens * (self._step_s + self._step_growth_s * tokens / 2)

    def block(self, now_s: float, seconds: float) -> None:
        """Stop decoding for `seconds`, after any earlier block has ended."""
        if seconds > 0:
            self.advance_to(now_s)
            self._blocked_until_s = max(self._blocked_until_s, now_s) + seconds

    def load_weights(self, now_s: float, version: int, load_s: float, *, encode_again: bool = False) -> float:
        """Pause to load weights and return the time at which decoding continues.

        `encode_again`: the prefixes of running samples are prefilled again with the new weights.
        """
        self.advance_to(now_s)
        prefill_s = self._timings.prefill_s * self.context_tokens if encode_again else 0.0
        self.block(now_s, load_s + prefill_s)

        self.version = version
        if self.running == 0:
            # No running sample needs the earlier versions, so the lists do not grow with the run.
            self._version_positions = [self.position]
            self._versions = [version]
        else:
            self._version_positions.append(self.position)
            self._versions.append(version)
        return self._blocked_until_s

    def set_slowdown(self, now_s: float, factor: float) -> None:
        """Decode `factor` times slower than alone from now on."""
        if factor != self.slowdown:
            self.advance_to(now_s)
            self.slowdown = factor
            self._update_step_time()

    def advance_to(self, now_s: float) -> None:
        """Generate what the running samples get until `now_s`. Samples that end are not removed."""
        unblocked_s = max(self._now_s, self._blocked_until_s)
        if self.running:
            self.busy_s += now_s - self._now_s
            if now_s > unblocked_s:
                tokens = self._tokens_within(now_s - unblocked_s)
                self.position += tokens
                self.generated_tokens += tokens * self.running
                self._step_s += self._step_growth_s * tokens
        self._now_s = now_s

    def _tokens_within(self, seconds: float) -> float:
        """Solve step_s k + step_growth_s k^2 / 2 = seconds for k, the tokens per sample."""
        step_s = self._step_s
        growth_s = self._step_growth_s
        if growth_s == 0:
            return seconds / step_s
        # This form of the root does not cancel for small growth_s.
        return 2 * seconds / (step_s + math.sqrt(step_s * step_s + 2 * growth_s * seconds))

    def _update_step_time(self) -> None:
        timings = self._timings
        self._step_growth_s = self.slowdown * timings.context_s * self.running
        self._step_s = self.slowdown * (
            timings.step_s + timings.request_s * self.running + timings.context_s * self.context_tokens
        )

    def _remove_sample(self, sample: SimulatedSample, end_position: float) -> None:
        for version, tokens in self._split_by_version(sample.start_position, end_position):
            sample.tokens_by_version[version] = sample.tokens_by_version.get(version, 0.0) + tokens
        sample.remaining -= end_position - sample.start_position
        sample.is_running = False

        self.running -= 1
        self._context_base -= self._prompt_tokens + sample.generated_tokens - end_position
        if self.running == 0:
            self._context_base = -0.0  # drop the rounding errors of all samples so far
        self._update_step_time()

    def _split_by_version(self, start: float, end: float) -> Iterator[tuple[int, float]]:
        """Yield version and number of the tokens between two positions.

        A version that was replaced at `start` itself yields nothing, so a sample that had no token yet gets the new
        version only.
        """
        positions = self._version_positions
        index = bisect_right(positions, start) - 1
        while start < end:
            is_last = index + 1 == len(positions)
            until = end if is_last else min(end, positions[index + 1])
            if until > start:
                yield self._versions[index], until - start
            start = until
            index += 1

    @staticmethod
    def _is_current(entry: tuple[float, int, SimulatedSample]) -> bool:
        """True if the sample still runs and this entry is that of its current part."""
        end_position, _, sample = entry
        return sample.is_running and sample.end_position == end_position
