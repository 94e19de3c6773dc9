"""Figures of pairs of rounds."""

from __future__ import annotations

from statistics import median

from async_grpo.bench.figures import Figure
from async_grpo.bench.rollout.pairs import Pairs, Round
from async_grpo.bench.rollout.work import Work

BARE = "bare AsyncLLM, same requests"
WAVES = "bare AsyncLLM in waves, same requests"


def overhead(policy: str, work: Work, pairs: Pairs) -> list[Figure]:
    """Of the whole server: its speed beside that of bare vLLM, and what it costs in Python."""
    name = f"whole server, {policy}"
    used, used_by_bare = _cpu_us(pairs.whole), _cpu_us(pairs.baseline)
    cpu = Figure(f"{name}: CPU time of its process", used, "us/token", used_by_bare, BARE, used / used_by_bare)
    return [*_speed(name, work, BARE, pairs), cpu]


def dispatch(policy: str, work: Work, pairs: Pairs) -> list[Figure]:
    """What it is worth to start a completion whenever a slot is free."""
    return _speed(f"continuous dispatch, {policy}", work, WAVES, pairs)


def _speed(name: str, work: Work, baseline: str, pairs: Pairs) -> list[Figure]:
    speed, speed_of_baseline = _tokens_per_s(pairs.whole), _tokens_per_s(pairs.baseline)
    tokens, tokens_of_baseline = sum(pairs.whole[0].tokens), sum(pairs.baseline[0].tokens)
    asked = f"{work.concurrency} in flight, {work.lengths}"
    return [
        Figure(f"{name}, {asked}", speed, "tokens/s", speed_of_baseline, baseline, pairs.ratio),
        Figure(f"{name}: lowest of {len(pairs.ratios)} ratios", pairs.ratios[0], "x"),
        Figure(f"{name}: highest of {len(pairs.ratios)} ratios", pairs.ratios[-1], "x"),
        Figure(f"{name}: tokens of a round", tokens, "tokens", tokens_of_baseline, "asserted to be the same"),
    ]


def _tokens_per_s(rounds: list[Round]) -> float:
    return median(one.tokens_per_s for one in rounds)


def _cpu_us(rounds: list[Round]) -> float:
    return median(one.cpu_us_per_token for one in rounds)
