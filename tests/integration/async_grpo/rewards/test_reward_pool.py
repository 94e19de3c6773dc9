"""The reward pool with real worker processes: what verifiers do wrong, how it is counted, and that the pool goes on."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from async_grpo.app.launch.checks.trials import check_rewards
from async_grpo.config.rewards import HttpRewardConfig, RewardConfig, RewardsConfig
from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.rewards.base import RewardFailure, RewardInput, RewardResult
from async_grpo.rewards.pool import RewardPool
from tests.support.reward_pools import hanging_item, pool_of, rewards_of
from tests.support.waiting import until

REPOSITORY = Path(__file__).parents[4]
TRICKY = "tricky_rewards:tricky"
ANSWERS = "tricky_rewards:answers"

pytestmark = pytest.mark.usefixtures("verifiers_can_be_imported")


async def judge(pool: RewardPool, *completions: str, answer: str = "a") -> list[RewardResult]:
    return await pool.judge([RewardInput(completion, answer) for completion in completions])


async def test_a_verifier_gets_the_number_of_answered_tool_calls() -> None:
    async with pool_of("retool_reward") as pool:
        none, three = await pool.judge([RewardInput("17", "18"), RewardInput("17", "18", tool_calls=3)])
    assert (none.reward, three.reward) == (-1.0, pytest.approx(-0.7))


async def test_a_hanging_verifier_is_killed_and_other_items_are_judged() -> None:
    async with pool_of(TRICKY, deadline_s=1.5) as pool:
        before, hung, deaf, after = await judge(pool, "a", "hang", "hang and ignore SIGTERM", "b")
    assert (before.reward, hung.reward, deaf.reward, after.reward) == (1.0, None, None, 0.0)
    assert hung.failure == deaf.failure == "timeout"
    assert re.match(rf"{TRICKY}: .*1\.5 s", hung.reason)


BAD_DEEDS = [
    ("raise", "raised", "RuntimeError: cannot judge this"),
    ("exit", "raised", "SystemExit: 3"),
    ("crash", "crashed", "its process exited with code 7"),
    ("segfault", "crashed", "was killed by SIGSEGV. Output: Fatal Python error: Segmentation fault"),
    ("close everything", "crashed", "closed its channel and was killed"),
    ("scribble", "output", "wrote to the pool's channel"),
    ("eat memory", "memory", "used more than rewards.memory_bytes and was killed"),
    ("MemoryError", "memory", "MemoryError"),
    ("none", "none", "it returned None"),
    ("nan", "bad_value", "nan is not a finite number"),
    ("infinite", "bad_value", "inf is not a finite number"),
    ("too large", "bad_value", "1e+30 is not a finite number within 1e+06"),
    ("huge", "bad_value", "OverflowError"),
    ("text", "bad_value", "'1' is a str, not a number"),
    ("array", "bad_value", "is a ndarray, not a number"),
]


async def test_failures_are_unverifiable_and_counted_by_kind() -> None:
    async with pool_of(TRICKY) as pool:
        for deed, kind, reason in BAD_DEEDS:
            bad, after = await judge(pool, deed, "a")
            assert (bad.reward, bad.failure) == (None, kind), deed
            assert reason in bad.reason
            assert after.reward == 1.0
    assert pool.failures == Counter((TRICKY, kind) for _, kind, _ in BAD_DEEDS)


async def test_numpy_numbers_booleans_and_100_mb_of_output_are_accepted() -> None:
    async with pool_of(TRICKY) as pool:
        rewards = [verdict.reward for verdict in await judge(pool, "numpy", "bool", "print 100 MB", "a")]
    assert rewards == [0.5, 1.0, 1.0, 1.0]
    assert not pool.failures


async def test_the_pool_recovers_from_failures_of_every_kind() -> None:
    deeds = ["hang", "crash", "segfault", "raise", "nan", "eat memory", "hang"]
    mixed = [item for deed in deeds for item in (deed, "a", "b")]
    async with pool_of(TRICKY, workers=2, deadline_s=1.5) as pool:
        rewards = [verdict.reward for verdict in await judge(pool, *mixed)]
        assert rewards == [None, 1.0, 0.0] * len(deeds)
        assert pool.failures.total() == len(deeds)
        good = await judge(pool, *["a"] * 300)
        assert [verdict.reward for verdict in good] == [1.0] * 300


def test_the_pool_works_on_uvloop() -> None:
    async def serve() -> list[RewardResult]:
        async with pool_of(TRICKY, workers=2, deadline_s=1.5) as pool:
            return await judge(pool, "a", "hang", "crash", "raise", "b")

    verdicts = uvloop.run(serve())
    assert [verdict.failure for verdict in verdicts] == ["", "timeout", "crashed", "raised", ""]
    assert [verdict.reward for verdict in verdicts] == [1.0, None, None, None, 0.0]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_blocked_event_loop_loses_no_reply(run: Callable[[Any], RewardResult]) -> None:
    async def serve() -> RewardResult:
        async with pool_of("answer_tag", deadline_s=1.5) as pool:
            judging = asyncio.create_task(judge(pool, "<answer>a</answer>"))
            for _ in range(5):
                await asyncio.sleep(0)  # the assignment is on its way
            time.sleep(2.0)  # noqa: ASYNC251
            return (await judging)[0]

    assert run(serve()).reward == 1.0


async def test_a_cancelled_call_leaves_no_stale_reply(tmp_path: Path) -> None:
    async with pool_of(TRICKY) as pool:
        right = RewardInput("a", "a")
        judging = asyncio.create_task(pool.judge([right, hanging_item(tmp_path / "hangs"), right]))
        await until((tmp_path / "hangs").exists)
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        (verdict,) = await judge(pool, "x")
    assert verdict.reward == 0.0


async def test_a_failed_optional_reward_is_omitted() -> None:
    functions = [RewardConfig(name="answer_tag"), RewardConfig(name=TRICKY, weight=0.5, required=False)]
    async with RewardPool(rewards_of("format").model_copy(update={"functions": functions})) as pool:
        without, with_it = await pool.judge([RewardInput("crash", "a"), RewardInput("<answer>a</answer>", "a")])
    assert (without.reward, without.scores, without.failure) == (0.0, {"answer_tag": 0.0}, "")
    assert without.failures[TRICKY].kind == "crashed"
    assert (with_it.reward, with_it.failures) == (1.0, {})
    assert pool.failures == {(TRICKY, "crashed"): 1}


async def test_verifiers_after_a_hanging_one_still_run() -> None:
    functions = [
        RewardConfig(name=TRICKY, required=False),
        RewardConfig(name="format"),
        RewardConfig(name="answer_tag"),
    ]
    async with RewardPool(rewards_of("format", deadline_s=1.5).model_copy(update={"functions": functions})) as pool:
        (verdict,) = await judge(pool, "hang")
    assert verdict.failures[TRICKY].kind == "timeout"
    assert verdict.scores == {"format": 0.0, "answer_tag": 0.0}


async def test_verifiers_may_be_async_or_classes_and_use_the_prompt() -> None:
    async with pool_of("tricky_rewards:waits", "tricky_rewards:Remembers") as pool:
        first, second = await pool.judge([RewardInput("", "p", "p", {"level": "3"}), RewardInput("", "a", "p")])
    assert first.scores == {"tricky_rewards:waits": 1.0, "tricky_rewards:Remembers": 2.0}  # the trial was the first
    assert second.scores == {"tricky_rewards:waits": 0.0, "tricky_rewards:Remembers": 3.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gms8k", "'gms8k'.*answer_tag.*math_verify"),
        ("no_such_module:score", "ModuleNotFoundError.*PYTHONPATH"),
        ("tricky_rewards:no_such", "AttributeError"),
        ("tricky_rewards:HANGS_S", "type float"),
        ("tricky_rewards:wants_three", r"signature \(completion.*reference"),
        ("tricky_rewards:says_yes", "bad_value.*'yes'"),
        ("tricky_rewards:hangs", r"\(timeout\)"),
        ("tricky_rewards:mistyped", r"\(raised\).*NameError.*'complition'"),
    ],
)
def test_an_unusable_verifier_is_an_error_before_the_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rewards(rewards_of(name, deadline_s=1.0))


def test_usable_rewards_pass_the_check() -> None:
    check_rewards(rewards_of("math_verify", TRICKY, "tricky_rewards:Remembers", "format"))


async def test_a_failed_import_in_the_worker_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("import os\nos.environ['ONLY_HERE']\ndef score(c, a): return 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ONLY_HERE", "1")
    with pytest.raises(ConfigError, match="KeyError: 'ONLY_HERE'"):
        await pool_of("only_here:score").start()
    async with pool_of("only_here:score", environment=["ONLY_HERE"]) as pool:
        assert [verdict.reward for verdict in await judge(pool, "b")] == [1.0]


async def test_an_import_that_fails_later_is_counted_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "broken"
    source = f"import os\nfrom pathlib import Path\nif Path({str(flag)!r}).exists(): raise RuntimeError('broken')\n"
    (tmp_path / "fickle.py").write_text(source + "def score(c, a):\n    return os._exit(1) if c == 'crash' else 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with pool_of("fickle:score") as pool:
        flag.touch()
        crashed, broken = await judge(pool, "crash", "a")
        assert (crashed.failure, broken.failure) == ("crashed", "import")
        assert "RuntimeError: broken" in broken.reason
        flag.unlink()
        assert [verdict.reward for verdict in await judge(pool, "a")] == [1.0]


async def test_a_worker_that_does_not_start_is_a_start_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(5)\n")
    (tmp_path / "stays.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="code 5"):
        await pool_of("ends:score").start()
    with pytest.raises(ConfigError, match=r"0\.5 s"):
        await pool_of("stays:score", start_timeout_s=0.5).start()


def test_the_example_of_the_documentation_runs() -> None:
    command = [sys.executable, "-m", "examples.reward_functions"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert "'It is 4.': 1.184" in done.stdout
    assert "'Because it is there.': masked, examples.reward_functions:right_answer: it returned None" in done.stdout


async def extract_answers(pool: RewardPool, *completions: str) -> list[str | None]:
    """Answers; of an extraction that failed its kind, in brackets."""
    answers = await pool.extract_answers(ANSWERS, completions)
    return [f"({answer.kind})" if isinstance(answer, RewardFailure) else answer for answer in answers]


async def test_answers_are_extracted_by_the_named_function() -> None:
    async with pool_of("format", "gsm8k", workers=2) as pool:
        assert pool.explain_missing_extraction("gsm8k") is None
        assert "format does not extract answers" in (pool.explain_missing_extraction("format") or "")
        assert await pool.extract_answers("gsm8k", ["#### 1,800", "so 9.", "none"]) == ["1800", "9", None]
        (verdict,) = await pool.judge([RewardInput("#### 18", "18")])
        assert verdict.scores == {"format": 0.0, "gsm8k": 1.0}


async def test_an_http_judge_cannot_extract_answers() -> None:
    functions = [RewardConfig(name="judge", http=HttpRewardConfig(url="http://127.0.0.1:1"))]
    async with RewardPool(RewardsConfig(functions=functions)) as pool:
        assert "HTTP judge" in (pool.explain_missing_extraction("judge") or "")


async def test_a_failed_extraction_has_a_reason_and_is_counted() -> None:
    async with pool_of(ANSWERS, deadline_s=3.0) as pool:
        answers = await extract_answers(pool, "fine", "raise", "number", "crash", "nothing", "long", "fine")
        assert answers == ["FINE", "(extraction)", "(extraction)", "(crashed)", None, None, "FINE"]
        (failure,) = await pool.extract_answers(ANSWERS, ["raise"])
        assert failure == RewardFailure("extraction", "ValueError: no")
        assert pool.failures == Counter({(ANSWERS, "extraction"): 3, (ANSWERS, "crashed"): 1})


async def test_a_hanging_extraction_is_killed_and_judging_continues() -> None:
    async with pool_of(ANSWERS, deadline_s=1.5) as pool:
        assert await extract_answers(pool, "hang", "fine") == ["(timeout)", "FINE"]
        assert pool.failures == Counter({(ANSWERS, "timeout"): 1})
        (verdict,) = await pool.judge([RewardInput("hang", "x")])
        assert verdict.reward == 1.0


async def test_a_closed_pool_rejects_judging_and_extraction() -> None:
    pool = pool_of("gsm8k")
    async with pool:
        pass
    await pool.aclose()
    for call in (judge(pool, "a"), pool.extract_answers("gsm8k", ["#### 1"])):
        with pytest.raises(AsyncGrpoError, match="closed"):
            await call
