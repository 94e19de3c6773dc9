"""A simulated engine: durations of concurrent samples, and the versions of their tokens."""

from __future__ import annotations

import pytest

from async_grpo.lab.simulate.engine import SimulatedEngine, SimulatedSample
from async_grpo.lab.simulate.timings import EngineTimings


def engine_of(**timings: float) -> SimulatedEngine:
    plain = {"step_s": 1.0, "request_s": 0.0, "context_s": 0.0, "prefill_s": 0.0}
    return SimulatedEngine(EngineTimings(**{**plain, **timings}), prompt_tokens=10)


def ends(engine: SimulatedEngine, samples: dict[float, SimulatedSample]) -> list[float]:
    """Start the samples at these times and return the times at which they end."""
    waiting = sorted(samples.items())
    end_s: dict[int, float] = {}
    while len(end_s) < len(samples):
        next_s = engine.next_end_s()
        if waiting and waiting[0][0] <= next_s:
            at_s, sample = waiting.pop(0)
            engine.start_sample(at_s, sample, prompt=1.0)
            continue
        for sample in engine.collect_finished(next_s):
            end_s[id(sample)] = next_s
    return [end_s[id(sample)] for _, sample in sorted(samples.items())]


def test_a_single_sample_takes_a_step_per_token() -> None:
    assert ends(engine_of(step_s=0.5), {2.0: SimulatedSample(None, 8)}) == [6.0]


def test_samples_slow_each_other_while_both_run() -> None:
    # Alone a token takes 1 + 1 = 2 s, together 1 + 2 = 3 s. From 0 to 4 s the first makes 2 tokens; then both run, and
    # the first needs 3 more tokens: 9 s. The second has 3 tokens then, and makes its last one in 2 s.
    first, second = SimulatedSample(None, 5), SimulatedSample(None, 4)
    assert ends(engine_of(request_s=1.0), {0.0: first, 4.0: second}) == [13.0, 15.0]


def test_the_context_slows_the_engine_as_it_grows() -> None:
    # A step takes 0.1 s for each of the prompt's 10 tokens and of the k made so far: 1.0 + 0.1 k. The integral to 50 is
    # 50 + 0.1 * 50**2 / 2 = 175 s. A second sample after 30 tokens, at 75 s, adds its own context: 5 + 0.2 k a step.
    engine = engine_of(step_s=0.0, context_s=0.1)
    assert ends(engine, {0.0: SimulatedSample(None, 50)}) == [pytest.approx(175)]
    engine = engine_of(step_s=0.0, context_s=0.1)
    both = {0.0: SimulatedSample(None, 50), 75.0: SimulatedSample(None, 20)}
    assert ends(engine, both) == [pytest.approx(75 + 20 * 5 + 0.2 * 20**2 / 2)] * 2


def test_prefill_delays_the_other_samples() -> None:
    first, second = SimulatedSample(None, 10), SimulatedSample(None, 10)
    # Both prompts of 10 tokens take 2 s, in which nothing is decoded.
    assert ends(engine_of(prefill_s=0.2), {0.0: first, 5.0: second}) == [14.0, 17.0]


def test_tokens_have_the_version_that_generated_them() -> None:
    engine, sample = engine_of(), SimulatedSample(None, 10)
    engine.start_sample(0.0, sample, prompt=1.0)
    engine.load_weights(4.0, 1, load_s=2.0)
    assert engine.next_end_s() == 12.0
    engine.load_weights(9.0, 2, load_s=0.0)
    assert engine.collect_finished(12.0) == [sample]
    assert sample.tokens_by_version == pytest.approx({0: 4, 1: 3, 2: 3})


def test_a_sample_without_tokens_gets_the_new_version_only() -> None:
    engine, sample = engine_of(), SimulatedSample(None, 3)
    engine.start_sample(1.0, sample, prompt=1.0)
    engine.load_weights(1.0, 1, load_s=0.5)
    engine.collect_finished(engine.next_end_s())
    assert sample.tokens_by_version == pytest.approx({1: 3})


def test_a_stopped_sample_continues_and_reads_its_prefix_again() -> None:
    engine, sample = engine_of(prefill_s=0.1), SimulatedSample(None, 10)
    engine.start_sample(0.0, sample, prompt=1.0)  # 10 prompt tokens: 1 s
    engine.stop_sample(5.0, sample, lost_tokens=1.0)  # 4 tokens, of which the last is lost
    assert (sample.remaining, sample.tokens_by_version) == (pytest.approx(7), pytest.approx({0: 3}))
    engine.start_sample(20.0, sample, prompt=1.0)  # 13 tokens are read: 1.3 s
    assert engine.next_end_s() == pytest.approx(28.3)


def test_a_slowdown_applies_while_it_is_set() -> None:
    engine, sample = engine_of(), SimulatedSample(None, 10)
    engine.start_sample(0.0, sample, prompt=1.0)
    engine.set_slowdown(4.0, 2.0)  # 6 tokens to go, 2 s each
    engine.set_slowdown(8.0, 1.0)  # 4 tokens to go
    assert engine.next_end_s() == pytest.approx(12.0)


def test_an_engine_is_busy_while_a_sample_runs() -> None:
    engine = engine_of()
    ends(engine, {1.0: SimulatedSample(None, 2), 2.0: SimulatedSample(None, 2), 10.0: SimulatedSample(None, 1)})
    assert engine.busy_s == pytest.approx(4.0)
    assert engine.generated_tokens == pytest.approx(5.0)
