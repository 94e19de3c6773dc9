"""A simulated engine: samples that share its decoding steps, on a clock of tokens.

All running samples get a token in every decoding step, so one number, `position`, says how many tokens each of them
has got since the engine began. A sample that needs n more ends at position + n, whatever joins or leaves meanwhile;
only the time at which the engine is there changes:

    d position / dt  =  1 / (beside * (step_s + request_s * running + context_s * tokens in the cache))

and nothing while the engine is blocked, by a prompt that it reads or by weights that it loads. The positions at which
the version changed say which tokens of a sample are of which version.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator

from async_grpo.lab.simulate.timings import EngineTimings

_ROUNDING = 1e-6


class SimulatedSample:
    """A completion in the making. `tokens`: version -> tokens, of the parts that have ended."""

    __slots__ = ("began", "ends", "group", "is_running", "left", "tokens")

    def __init__(self, group: object, length: float) -> None:
        self.group = group
        self.left = length
        """Tokens still to come when it last began to run."""
        self.tokens: dict[int, float] = {}
        self.is_running = False
        self.began = 0.0
        self.ends = 0.0

    @property
    def done(self) -> float:
        """Tokens of the parts that have ended."""
        return sum(self.tokens.values())


class SimulatedEngine:
    """One engine. Every method takes the time first and brings the engine there."""

    def __init__(self, timings: EngineTimings, *, prompt_tokens: float) -> None:
        self._timings = timings
        self._prompt_tokens = prompt_tokens
        self.version = 0
        self.running = 0
        self.position = 0.0
        self.beside = 1.0
        """How much slower it is than alone."""
        self.busy_s = 0.0
        """Seconds in which at least one sample was running."""
        self.generated = 0.0
        """Tokens, all samples together."""
        self._at_s = 0.0
        self._blocked_until_s = 0.0
        self._step_s = timings.step_s
        """Seconds of a decoding step now."""
        self._growth_s = 0.0
        """By how much each step is longer than the one before, since the context grows."""
        self._context = 0.0
        """Tokens in the cache, less `running * position`."""
        self._ends: list[tuple[float, int, SimulatedSample]] = []
        self._number = 0
        self._changes: list[float] = [0.0]
        """Positions at which the version changed, and the versions."""
        self._versions: list[int] = [0]

    @property
    def context_tokens(self) -> float:
        """Tokens in the KV cache."""
        return self._context + self.running * self.position

    def start(self, now_s: float, sample: SimulatedSample, *, prompt: float) -> None:
        """Run a sample. `prompt`: share of its prompt's time that must be spent first, 0 if the prompt has been read.
        What the sample had before is read again."""
        self.advance(now_s)
        had = sample.done
        self.block(now_s, self._timings.prefill_s * (had + self._prompt_tokens * prompt))
        sample.is_running, sample.began, sample.ends = True, self.position, self.position + sample.left
        self._number += 1
        heapq.heappush(self._ends, (sample.ends, self._number, sample))
        self.running += 1
        self._context += self._prompt_tokens + had - self.position
        self._set_speed()

    def stop(self, now_s: float, sample: SimulatedSample, *, lose: float = 0.0) -> None:
        """Take a running sample out; it keeps the tokens that it has, without the last `lose`."""
        self.advance(now_s)
        self._leave(sample, max(sample.began, self.position - lose))

    def finished(self, now_s: float) -> list[SimulatedSample]:
        """The samples that have got their last token; they no longer run."""
        self.advance(now_s)
        found: list[SimulatedSample] = []
        ends = self._ends
        while ends and (ends[0][0] <= self.position + _ROUNDING or not self._is_live(ends[0])):
            entry = heapq.heappop(ends)
            if self._is_live(entry):
                self._leave(entry[2], entry[0])
                found.append(entry[2])
        return found

    def next_s(self) -> float:
        """When the next sample ends; inf if none runs."""
        ends = self._ends
        while ends and not self._is_live(ends[0]):
            heapq.heappop(ends)
        if not ends:
            return math.inf
        tokens = max(0.0, ends[0][0] - self.position)
        return max(self._at_s, self._blocked_until_s) + tokens * (self._step_s + self._growth_s * tokens / 2)

    def block(self, now_s: float, seconds: float) -> None:
        """Let nothing get a token for so long."""
        if seconds > 0:
            self.advance(now_s)
            self._blocked_until_s = max(self._blocked_until_s, now_s) + seconds

    def load(self, now_s: float, version: int, load_s: float, *, encode_again: bool = False) -> float:
        """Pause to load weights; returns when it goes on. `encode_again`: the samples' prefixes are read again."""
        self.advance(now_s)
        self.block(now_s, load_s + (self._timings.prefill_s * self.context_tokens if encode_again else 0.0))
        self.version = version
        if self.running == 0:
            self._changes, self._versions = [self.position], [version]
        else:
            self._changes.append(self.position)
            self._versions.append(version)
        return self._blocked_until_s

    def slow_down(self, now_s: float, beside: float) -> None:
        """Work at 1 / `beside` of the speed that it has alone."""
        if beside != self.beside:
            self.advance(now_s)
            self.beside = beside
            self._set_speed()

    def advance(self, now_s: float) -> None:
        """Bring the engine to that time."""
        begun_s = max(self._at_s, self._blocked_until_s)
        if self.running:
            self.busy_s += now_s - self._at_s
            if now_s > begun_s:
                tokens = self._tokens_in(now_s - begun_s)
                self.position += tokens
                self.generated += tokens * self.running
                self._step_s += self._growth_s * tokens
        self._at_s = now_s

    def _tokens_in(self, seconds: float) -> float:
        """Tokens k of each sample in that time: step_s k + growth_s k^2 / 2 = seconds."""
        step_s, growth_s = self._step_s, self._growth_s
        if growth_s == 0:
            return seconds / step_s
        return 2 * seconds / (step_s + math.sqrt(step_s * step_s + 2 * growth_s * seconds))

    def _set_speed(self) -> None:
        timings = self._timings
        self._growth_s = self.beside * timings.context_s * self.running
        self._step_s = self.beside * (
            timings.step_s + timings.request_s * self.running + timings.context_s * self.context_tokens
        )

    def _leave(self, sample: SimulatedSample, end: float) -> None:
        for version, tokens in self._spans(sample.began, end):
            sample.tokens[version] = sample.tokens.get(version, 0.0) + tokens
        sample.left -= end - sample.began
        sample.is_running = False
        self.running -= 1
        self._context -= self._prompt_tokens + sample.done - end
        if self.running == 0:
            self._context = -0.0
        self._set_speed()

    def _spans(self, began: float, end: float) -> Iterator[tuple[int, float]]:
        """Version and number of the tokens between two positions. The first of them needs no change: what has no token
        yet is of the version that is there when it gets one."""
        place = bisect_right(self._changes, began) - 1
        changes, versions = self._changes, self._versions
        while began < end:
            until = min(end, changes[place + 1]) if place + 1 < len(changes) else end
            if until > began:
                yield versions[place], until - began
            began, place = until, place + 1

    @staticmethod
    def _is_live(entry: tuple[float, int, SimulatedSample]) -> bool:
        return entry[2].is_running and entry[2].ends == entry[0]
