"""Judges behind HTTP, with a real server on this machine that does everything a server can do wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from aiohttp import web

from async_grpo.config.rewards import RewardConfig, RewardsConfig
from async_grpo.errors import ConfigError
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.pool import RewardPool

TOKEN = "s3cret-t0ken"


class FakeJudge:
    """A server whose paths are what it does. It keeps what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.released = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.bodies.append(await request.json())
            self.headers.append(dict(request.headers))
            return await self._do(request)
        finally:
            self.at_once -= 1

    async def _do(self, request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/hangs":
                await self.released.wait()
            case "/once-500" if len(self.bodies) == 1:
                return web.Response(status=500)
            case "/500":
                return web.Response(status=500, text="out of order")
            case "/404":
                return web.Response(status=404)
            case "/elsewhere":
                raise web.HTTPFound("/right")
            case "/garbage":
                return web.Response(text="<html>I am no JSON</html>")
            case "/null":
                return web.json_response({"score": None})
            case "/text":
                return web.json_response({"score": "1.0"})
            case "/nested":
                return web.json_response({"choices": [{"a/b": 0.25}]})
            case "/hangs-up":
                request.transport.abort()
            case "/50mb":
                return await self._flood(request)
            case "/slow":
                await asyncio.sleep(0.02)
        return web.json_response({"score": float(self.bodies[-1]["completion"] == self.bodies[-1]["answer"])})

    async def _flood(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(50):
            await response.write(b" " * (1 << 20))
        return response


@pytest.fixture
async def fake_judge() -> AsyncIterator[FakeJudge]:
    fake_judge, application = FakeJudge(), web.Application()
    application.router.add_post("/{path}", fake_judge.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake_judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake_judge
    fake_judge.released.set()
    await runner.cleanup()


def pool_of(url: str, *others: RewardConfig, **http: Any) -> RewardPool:
    settings = {"url": url, "timeout_s": 20.0, "retries": 2, "backoff_s": 0.01, **http}
    judge = RewardConfig.model_validate({"name": "judge", "http": settings})
    return RewardPool(RewardsConfig(functions=[judge, *others]))


async def test_the_judge_gets_the_whole_item_and_returns_the_score(fake_judge: FakeJudge) -> None:
    async with pool_of(f"{fake_judge.url}/right", extra={"rubric": "be right"}) as pool:
        right, wrong = await pool.judge([RewardInput("a", "a", "which letter?", {"level": "1"}), RewardInput("b", "a")])
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert pool.supervisor.pid is None
    (body,) = [body for body in fake_judge.bodies if body["completion"] == "a"]
    assert body == {
        "completion": "a",
        "answer": "a",
        "prompt": "which letter?",
        "metadata": {"level": "1"},
        "tool_calls": 0,
        "rubric": "be right",
    }


async def test_scores_of_verifiers_and_judges_are_summed(fake_judge: FakeJudge) -> None:
    tag = RewardConfig(name="answer_tag", weight=0.5)
    async with pool_of(f"{fake_judge.url}/nested", tag, score_pointer="/choices/0/a~1b") as pool:
        (verdict,) = await pool.judge([RewardInput("<answer>a</answer>", "a")])
    assert verdict.scores == {"answer_tag": 1.0, "judge": 0.25}
    assert verdict.reward == 0.75


@pytest.mark.parametrize(
    ("path", "kind", "reason", "requests"),
    [
        ("500", "http_status", "the judge answered with status 500", 3),
        ("404", "http_status", "the judge answered with status 404", 1),
        ("elsewhere", "http_status", "the judge answered with status 302", 1),
        ("hangs-up", "http_connection", "the judge cannot be reached: ServerDisconnectedError", 3),
        ("garbage", "http_bad_reply", "the reply is not JSON", 1),
        ("50mb", "http_bad_reply", "the reply is above 65536 bytes", 1),
        ("text", "http_bad_reply", "the reply has no score at '/score': '1.0' is a str, not a number", 1),
        ("nested", "http_bad_reply", "the reply has nothing at '/score': 'score'", 1),
        ("null", "none", "the judge answered null", 1),
    ],
)
async def test_failures_are_unverifiable_and_counted_by_kind(
    fake_judge: FakeJudge, path: str, kind: str, reason: str, requests: int
) -> None:
    async with pool_of(f"{fake_judge.url}/{path}") as pool:
        (verdict,) = await pool.judge([RewardInput("a", "a")])
    assert (verdict.reward, verdict.failure) == (None, kind)
    assert reason in verdict.reason
    assert pool.failures == {("judge", kind): 1}
    assert len(fake_judge.bodies) == requests


async def test_a_hanging_judge_times_out_without_blocking_the_event_loop(fake_judge: FakeJudge) -> None:
    async with pool_of(f"{fake_judge.url}/hangs", timeout_s=0.3, retries=1) as pool:
        judging, turns = asyncio.create_task(pool.judge([RewardInput("a", "a")])), 0
        while not judging.done():
            await asyncio.sleep(0.005)
            turns += 1
        (verdict,) = judging.result()
    assert (verdict.failure, verdict.reason) == ("http_timeout", "judge: no reply within 0.3 s")
    assert len(fake_judge.bodies) == 2
    assert turns > 20


async def test_a_failed_request_is_retried_and_a_missing_judge_is_a_connection_failure(
    fake_judge: FakeJudge,
) -> None:
    async with pool_of(f"{fake_judge.url}/once-500") as pool, pool_of("http://127.0.0.1:1/") as nobody:
        ((verdict,), (none,)) = [await one.judge([RewardInput("a", "a")]) for one in (pool, nobody)]
    assert (verdict.reward, verdict.failures, len(fake_judge.bodies)) == (1.0, {}, 2)
    assert none.failure == "http_connection"


async def test_concurrency_is_limited(fake_judge: FakeJudge) -> None:
    async with pool_of(f"{fake_judge.url}/slow", concurrency=3) as pool:
        verdicts = await pool.judge([RewardInput("a", "a")] * 20)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 20
    assert fake_judge.most_at_once == 3


async def test_the_token_is_sent_only_to_the_judge(fake_judge: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", f"{TOKEN}\n")
    pool = pool_of(f"{fake_judge.url}/500", token_env="JUDGE_TOKEN", headers={"X-Run": "7"})
    with structlog.testing.capture_logs() as logs:
        async with pool:
            (verdict,) = await pool.judge([RewardInput("a", "a")])
    assert fake_judge.headers[0]["Authorization"] == f"Bearer {TOKEN}"
    assert fake_judge.headers[0]["X-Run"] == "7"
    assert logs and TOKEN not in json.dumps(logs)
    assert TOKEN not in repr(verdict)


def test_a_missing_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", " ")
    with pytest.raises(ConfigError, match=r"'judge'.*JUDGE_TOKEN"):
        pool_of("http://127.0.0.1:1/", token_env="JUDGE_TOKEN")


async def test_a_cancelled_request_frees_its_slot(fake_judge: FakeJudge) -> None:
    async with pool_of(f"{fake_judge.url}/hangs", concurrency=1) as pool:
        judging = asyncio.create_task(pool.judge([RewardInput("a", "a")]))
        async with asyncio.timeout(20):
            while not fake_judge.bodies:
                await asyncio.sleep(0.005)
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        fake_judge.released.set()
        assert (await pool.judge([RewardInput("b", "b")]))[0].reward == 1.0
