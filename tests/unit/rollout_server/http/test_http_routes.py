"""Responses and refusals of each route."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import structlog

from async_grpo.config.http import HttpConfig
from async_grpo.errors import BufferFault, ConfigError, EngineError, RequestRefused
from async_grpo.telemetry.metrics import SERVER_METRICS
from async_grpo.utils.http_server import is_local_name
from buffer.base import BufferStats
from rollout_server.http.context import ApiKeys
from rollout_server.http.streaming import read_json_body
from tests.support.http_fakes import (
    ADMIN,
    CONTEXT,
    STOP,
    Letters,
    ServerHarness,
    http_config,
    make_harness,
    script_of,
    scripted,
)
from tests.support.rollout_fakes import FakeEngine
from tests.support.waiting import until


@pytest.fixture
async def harness(tmp_path: Path) -> ServerHarness:
    return await make_harness(tmp_path, await scripted(script_of("hello")), keys=ApiKeys(admin="open sesame"))


async def ask(harness: ServerHarness, *, chat: bool = False, **body: Any) -> Any:
    """Status and body of the response."""
    given = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    async with harness.client() as client:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        answer = await client.post(path, json={**given, **body})
    return answer.status_code, answer.json()


async def refusal(harness: ServerHarness, **body: Any) -> str:
    status, answer = await ask(harness, **body)
    assert status == 400, answer
    return str(answer["error"]["message"])


async def test_a_completion_has_the_policy_version_of_its_tokens(harness: ServerHarness) -> None:
    async with harness.client() as client:
        answer = await client.post("/v1/completions", json={"model": "test", "prompt": "hi"})
    body = answer.json()
    assert answer.headers["x-policy-version"] == body["system_fingerprint"] == "2-3"
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["policy_versions"]) == ("hello", "stop", [[3, 0, 6]])
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


async def test_a_chat_uses_the_chat_template_of_the_model(harness: ServerHarness) -> None:
    harness.engine._script = lambda request: [*bytes(request.prompt), STOP]
    parts = [{"type": "text", "text": "yes?"}]
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": parts}]
    status, body = await ask(harness, chat=True, messages=messages, max_completion_tokens=32)
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "<user>hi<user>yes?<assistant>"


async def test_a_chat_without_a_template_is_refused_with_the_fix(tmp_path: Path) -> None:
    tokenizer = Letters()
    tokenizer.chat_template = None
    harness = await make_harness(tmp_path, FakeEngine(), tokenizer=tokenizer)
    message = await refusal(harness, chat=True)
    assert "no chat template" in message
    assert "/v1/completions" in message


async def test_completions_of_several_prompts_are_in_order(harness: ServerHarness) -> None:
    harness.engine._script = lambda request: [*bytes(request.prompt), ord(str(request.seed)), STOP]
    _, body = await ask(harness, prompt=[[65], [66]], n=2, seed=4, stream=False)
    assert [choice["text"] for choice in body["choices"]] == ["A4", "A5", "B6", "B7"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2


async def test_seeds_of_several_completions_stay_below_two_to_the_63(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = await make_harness(tmp_path, engine)
    await ask(harness, prompt=[[65]], n=3, seed=2**63 - 2)
    assert [request.seed for request in engine.requests] == [2**63 - 2, 2**63 - 1, 0]


async def test_stop_texts_end_a_completion_and_free_the_engine(harness: ServerHarness) -> None:
    _, body = await ask(harness, stop=["l", "x"])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("he", "stop")
    assert harness.engine.load().running == 0


async def test_log_probabilities_are_those_of_the_sampled_tokens(harness: ServerHarness) -> None:
    _, body = await ask(harness, logprobs=0, max_tokens=2)
    expected = {"tokens": ["h", "e"], "token_logprobs": [-0.125, -0.75], "top_logprobs": None, "text_offset": [0, 1]}
    assert body["choices"][0]["logprobs"] == expected
    assert body["choices"][0]["finish_reason"] == "length"
    _, body = await ask(harness, chat=True, logprobs=True, max_tokens=1)
    first = {"token": "h", "logprob": -0.125, "bytes": [104], "top_logprobs": []}
    assert body["choices"][0]["logprobs"]["content"] == [first]


async def test_parameters_reach_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = await make_harness(tmp_path, engine)
    await ask(harness, temperature=0, seed=7, max_tokens=2)
    await ask(harness)
    await ask(harness, prompt=[1] * (CONTEXT - 3), top_p=1, top_k=-1, presence_penalty=0, logit_bias=None, user="me")
    asked, default, long = engine.requests
    assert long.max_tokens == 3
    assert (asked.temperature, asked.seed, asked.max_tokens, asked.interruptible) == (0, 7, 2, False)
    assert (default.temperature, default.seed, default.max_tokens) == (1.0, None, 8)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"top_p": 0.9}, "top_p is not supported: the policy is sampled from its full distribution"),
        ({"echo": True}, "echo is not supported"),
        ({"logprobs": 3}, "logprobs: Input should be less than or equal to 0"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"max_tokens": 5000}, "max_tokens: 5000 is above rollout.http.max_tokens (4096)"),
        ({"max_tokens": 62}, "after this prompt there is room for 61 within rollout.vllm.max_model_len (64)"),
        ({"n": 9}, "prompts (1) times n (9) must be from 1 to 8"),
        ({"prompt": [[1]] * 5, "n": 2}, "prompts (5) times n (2) must be from 1 to 8"),
        ({"prompt": []}, "prompts (0) times n (1) must be from 1 to 8"),
        ({"prompt": [[]]}, "prompt: it has no token"),
        ({"prompt": [256]}, "token 256 is not in the model's vocabulary of 256"),
        ({"prompt": [1] * 64}, "64 tokens leave no room for a completion"),
        ({"prompt": "ß"}, "the tokenizer of this model rejects the prompt: UnicodeEncodeError"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"chat": True, "messages": []}, "messages: List should have at least 1 item"),
        ({"chat": True, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"chat": True, "top_logprobs": 2}, "top_logprobs is not supported"),
    ],
)
async def test_unsupported_or_invalid_parameters_are_refused(
    harness: ServerHarness, body: dict[str, Any], expected: str
) -> None:
    assert expected in await refusal(harness, **body)


async def test_another_model_is_not_found(harness: ServerHarness) -> None:
    status, body = await ask(harness, model="gpt-4")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    async with harness.client() as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["policy_version"]) == ("test", "2-3")


async def test_bodies_are_bounded_and_are_json(tmp_path: Path) -> None:
    harness = await make_harness(tmp_path, FakeEngine(), config=http_config({"max_body_bytes": 1024}))
    status, body = await ask(harness, prompt="x" * 2000)
    assert (status, body["error"]["message"]) == (413, "the body is longer than rollout.http.max_body_bytes (1024)")
    async with harness.client() as client:
        form = await client.post("/v1/completions", content=b'{"prompt": "hi"}', headers={"content-type": "text/plain"})
        broken = await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (form.status_code, broken.status_code) == (415, 400)


async def test_a_body_that_does_not_arrive_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.requests import Request

    from rollout_server.http import streaming
    from rollout_server.http.streaming import HttpError

    async def never() -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr(streaming, "BODY_TIMEOUT_S", 0.01)
    headers = [(b"content-type", b"application/json")]
    with pytest.raises(HttpError, match=r"0\.01 s"):
        await read_json_body(Request({"type": "http", "method": "POST", "headers": headers}, never), 100)


async def test_completions_above_the_limit_are_refused(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.hold = True
    harness = await make_harness(tmp_path, engine, config=http_config({"max_concurrency": 3}))
    waiting = asyncio.create_task(ask(harness, n=2))
    await until(lambda: len(engine.held) == 2)
    status, body = await ask(harness, n=2)
    assert (status, body["error"]["code"]) == (429, "too_many_requests")
    engine.hold = False
    engine.release()
    assert (await waiting)[0] == 200
    assert (await ask(harness, n=2))[0] == 200


async def test_an_engine_that_fails_is_an_error_of_the_server(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = await make_harness(tmp_path, engine)
    engine.error = EngineError("rollout-0: the engine died")
    for stream in (False, True):
        status, body = await ask(harness, stream=stream)
        assert (status, body["error"]["message"]) == (503, "the engine failed: rollout-0: the engine died")


async def test_a_request_that_the_engine_refuses_is_an_error_of_the_client(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = await make_harness(tmp_path, engine)
    engine.error = RequestRefused("rollout-0: vLLM refused request r: too long")
    for stream in (False, True):
        status, body = await ask(harness, stream=stream)
        assert (status, body["error"]["code"]) == (400, "request_refused")


async def test_a_slow_request_times_out(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.hold = True
    harness = await make_harness(tmp_path, engine, config=http_config({"request_timeout_s": 0.05}))
    assert (await ask(harness))[0] == 504
    await until(lambda: not engine.held)


async def test_a_server_is_alive_before_it_is_ready(harness: ServerHarness) -> None:
    server, harness.http.server = harness.http.server, None
    async with harness.client() as client:
        assert (await client.get("/healthz")).json() == {"status": "alive", "server": "rollout-0"}
        early = await client.get("/readyz")
        assert (early.status_code, early.json()["reason"]) == (503, harness.http.absence_reason)
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 503
        harness.http.server = server
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["policy_version"]) == (200, "2-3")


async def test_a_draining_server_refuses_requests(harness: ServerHarness) -> None:
    async with harness.client() as client:
        answer = await client.post("/admin/drain", headers=ADMIN)
        assert (answer.status_code, answer.json()) == (202, {"admission": "draining", "groups_in_work": 0})
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server leaves the run")
        assert (await ask(harness))[0] == 503
        assert not harness.dispatcher.admission.stop_now.is_set()
        await client.post("/admin/drain?now=1", headers=ADMIN)
        assert harness.dispatcher.admission.stop_now.is_set()


async def test_a_paused_server_still_answers(harness: ServerHarness) -> None:
    async with harness.client() as client:
        assert (await client.post("/admin/pause", headers=ADMIN)).json()["admission"] == "paused"
        assert (await client.get("/readyz")).json()["admission"] == "paused"
        assert (await ask(harness))[0] == 200
        assert (await client.post("/admin/resume", headers=ADMIN)).json()["admission"] == "open"


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer guess"}, {"authorization": "Basic open sesame"}])
async def test_administration_needs_its_token(harness: ServerHarness, tmp_path: Path, header: dict[str, str]) -> None:
    async with harness.client() as client:
        for route in ("pause", "resume", "drain"):
            assert (await client.post(f"/admin/{route}", headers=header)).status_code == 401
        assert (await client.get("/admin/pause", headers=ADMIN)).status_code == 405
    async with (await make_harness(tmp_path, FakeEngine())).client() as client:  # whose environment has no token
        answer = await client.post("/admin/pause", headers=ADMIN)
    assert answer.status_code == 403
    assert "ASYNC_GRPO_ADMIN_TOKEN was not set" in answer.json()["error"]["message"]
    assert harness.dispatcher.admission.is_open


async def test_secrets_are_in_no_log_and_no_response(harness: ServerHarness) -> None:
    with structlog.testing.capture_logs() as logs:
        async with harness.client() as client:
            answers = [await client.post("/admin/pause", headers=header) for header in ({}, ADMIN)]
            metrics = await client.get("/metrics")
    everything = f"{logs} {[answer.text for answer in answers]} {metrics.text} {harness.http.keys!r}"
    assert "sesame" not in everything


async def test_completions_need_the_key_if_one_is_set(tmp_path: Path) -> None:
    harness = await make_harness(tmp_path, FakeEngine(), keys=ApiKeys(completions="k1"))
    async with harness.client("rollout.example") as client:
        for header, status in (({}, 401), ({"authorization": "Bearer k2"}, 401), ({"authorization": "Bearer k1"}, 200)):
            assert (await client.post("/v1/completions", json={"prompt": "a"}, headers=header)).status_code == status
            assert (await client.get("/v1/models", headers=header)).status_code == status
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-3"])
def test_a_server_reachable_from_other_machines_needs_a_key(host: str) -> None:
    config = HttpConfig(host=host)
    with pytest.raises(ConfigError, match=r"rollout\.http\.host .* ASYNC_GRPO_HTTP_KEY"):
        ApiKeys.from_environment({"ASYNC_GRPO_HTTP_KEY": ""}, config)
    assert ApiKeys.from_environment({"ASYNC_GRPO_HTTP_KEY": "k"}, config).completions == "k"
    for loopback in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert ApiKeys.from_environment({}, HttpConfig(host=loopback)) == ApiKeys()


async def test_a_foreign_host_name_is_refused(harness: ServerHarness) -> None:
    async with harness.client("evil.example") as client:
        assert (await client.get("/readyz")).status_code == 403
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 403


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1:80", True),
        ("localhost", True),
        ("[::1]:8000", True),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1", False),
        ("", False),
        ("[", False),
    ],
)
def test_names_of_the_loopback(host: str, local: bool) -> None:
    assert is_local_name(host) is local


async def test_no_page_and_no_schema_is_served(harness: ServerHarness) -> None:
    async with harness.client() as client:
        for path in ("/", "/docs", "/redoc", "/openapi.json"):
            answer = await client.get(path, headers={"origin": "http://localhost:1"})
            assert answer.status_code == 404
            assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_metrics_show_the_state_of_the_server(harness: ServerHarness) -> None:
    await ask(harness, n=2)
    await ask(harness, temperature=-1)
    harness.dispatcher.counters.groups["inserted"] += 3
    async with harness.client() as client:
        text = (await client.get("/metrics")).text
    for line in (
        'async_grpo_server_info{run="test",server="rollout-0"} 1.0',
        "async_grpo_ready 1.0",
        "async_grpo_http_tokens_total 12.0",
        "async_grpo_generated_tokens_total 0.0",
        "async_grpo_policy_version 3.0",
        "async_grpo_policy_epoch 2.0",
        "async_grpo_policy_versions_behind 0.0",
        "async_grpo_weight_updates_total 1.0",
        "async_grpo_window_capacity_groups 4.0",
        "async_grpo_window_fill_ratio 0.0",
        "async_grpo_admission_open 1.0",
        'async_grpo_groups_total{outcome="inserted"} 3.0',
        'async_grpo_http_responses_total{route="/v1/completions",status="200"} 1.0',
        'async_grpo_http_responses_total{route="/v1/completions",status="400"} 1.0',
    ):
        assert line in text.splitlines()


async def test_every_metric_of_the_table_is_exported(harness: ServerHarness) -> None:
    async with harness.client() as client:
        text = (await client.get("/metrics")).text
    assert "async_grpo_logprob_proof_gap 3e-06" in text.splitlines()
    assert re.findall(r"^# HELP async_grpo_(\w+)", text, re.MULTILINE) == [metric.key for metric in SERVER_METRICS]


async def test_the_buffer_is_queried_at_most_once_a_second_and_may_not_answer(harness: ServerHarness) -> None:
    asked = 0

    async def stats() -> BufferStats:
        nonlocal asked
        asked += 1
        raise BufferFault("gone")

    harness.context.buffer.stats = stats  # type: ignore[method-assign]
    async with harness.client() as client:
        texts = [(await client.get("/metrics")).text for _ in range(3)]
    assert asked == 1
    assert "async_grpo_buffer_up 0.0" in texts[2].splitlines()
    assert "async_grpo_window_groups" not in texts[2]


@pytest.mark.parametrize(("port", "is_on"), [(0, True), (8000, True), (None, False), (-1, False)])
def test_http_may_be_off(port: int | None, is_on: bool) -> None:
    assert HttpConfig(port=port).is_on is is_on
