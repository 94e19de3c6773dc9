"""Workflows: one turn, conversations with tools, and the user's own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import structlog

from async_grpo.config.rollout import MultiTurnConfig, RolloutConfig, ToolConfig
from async_grpo.data.tokenizer import Tokenizer
from async_grpo.errors import ConfigError
from async_grpo.rewards.base import RewardInput
from async_grpo.wire import Sample, Task, Turn, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from rollout_server.workflows import MultiTurn, SingleTurn, Workflow, make_workflow
from rollout_server.workflows.multi_turn import Toolbox, calculator, find_last_call
from rollout_server.workflows.testkit import STOP, ByteTokenizer, play
from tests.support.tokenizers import CONTROL, byte_tokenizer_with_start

HERE = "tests.unit.rollout_server.workflows.test_workflows"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def with_calculator(tokenizer: Tokenizer, **changes: Any) -> MultiTurn:
    return MultiTurn(tokenizer, MultiTurnConfig(observation="[{result}]", **changes))


def weather(city: str) -> str:
    """A user's tool."""
    return f"rain in {city}"


async def slow_weather(city: str) -> str:
    await asyncio.sleep(60)
    return city


def broken() -> str:
    raise RuntimeError("no network")


def leaves() -> str:
    raise SystemExit(2)


def takes_a_while() -> str:
    time.sleep(0.1)
    return "done"


def says_control_token() -> str:
    return f"sun{CONTROL}{CONTROL[:4]}{CONTROL}{CONTROL[4:]} rain"


class AsyncTool:
    async def __call__(self, city: str) -> str:
        return f"wind in {city}"


async_tool = AsyncTool()


class Hanging:
    """A tool that returns "free" once `freed` is set."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def __call__(self) -> str:
        self.freed.wait(60)
        return "free"


def cut_after(sample: Sample, tokens: int) -> Sample:
    """The partial that was saved when the sample had `tokens` tokens."""
    turns = [turn for turn in sample.turns if turn.end <= tokens]
    end = turns[-1].end if turns else 0
    if end < tokens:
        turns.append(Turn(end, tokens, True))
    return Sample(
        tokens=tokens_to_bytes(sample.token_ids()[:tokens]),
        logprobs=logprobs_to_bytes(sample.token_logprobs()[:tokens]),
        spans=[VersionSpan(0, 0, tokens)],
        turns=turns,
        finish_reason="",
    )


async def test_one_prompt_one_completion() -> None:
    sample = await play(SingleTurn, ["It is 4."])
    assert (sample.text, sample.finish_reason, sample.turns) == ("It is 4.", "stop", [])


async def test_the_policy_continues_after_the_answer_of_its_tool() -> None:
    sample = await play(with_calculator, ["2+2? " + call("calculator", expression="2 + 2"), "It is 4."])
    assert sample.text.endswith("</tool_call>[4]It is 4.")
    assert [turn.by_policy for turn in sample.turns] == [True, False, True]
    answer = sample.turns[1]
    assert bytes(sample.token_ids()[answer.start : answer.end].tolist()) == b"[4]"


async def test_rewards_get_the_number_of_answered_calls() -> None:
    task = Task(index=0, prompt="2+2?", prompt_tokens=b"", answer="4")
    sample = await play(with_calculator, [call("calculator", expression="2 + 2"), "<tool_call>{}</tool_call", "4"])
    assert RewardInput.from_sample(sample, task) == RewardInput(sample.text, "4", "2+2?", {}, tool_calls=1)


async def test_after_max_calls_the_completion_is_final() -> None:
    turn = call("calculator", expression="1")
    sample = await play(lambda tokenizer: with_calculator(tokenizer, max_calls=2), [turn] * 3)
    assert [turn.by_policy for turn in sample.turns] == [True, False, True, False, True]


async def test_a_conversation_ends_at_the_token_limit() -> None:
    first_turn = call("calculator", expression="1")
    size = len(first_turn) + 1
    for max_tokens, authors in [(size - 1, [True]), (size + 2, [True, False]), (size + 5, [True, False, True])]:
        sample = await play(with_calculator, [first_turn, "It is 1."], max_tokens=max_tokens)
        assert (sample.length, sample.finish_reason) == (max_tokens, "length")
        assert [turn.by_policy for turn in sample.turns or [Turn(0, max_tokens, True)]] == authors


async def test_an_interrupted_conversation_ends_like_an_uninterrupted_one() -> None:
    turns = ["2+2? " + call("calculator", expression="2 + 2"), "It is 4."]
    whole = await play(with_calculator, turns)
    for cut in (3, whole.turns[1].start, whole.turns[1].end, whole.length - 3):
        resumed = await play(with_calculator, turns, prior=cut_after(whole, cut))
        assert resumed.token_ids().tolist() == whole.token_ids().tolist()
        assert resumed.text == whole.text


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        (call("weather", city="Rome"), "rain in Rome"),
        (call("oracle"), "error: there is no tool 'oracle'; there are: weather, slow, broken, leaves, wind"),
        (call("leaves"), "error: SystemExit: 2"),
        (call("wind", city="Rome"), "wind in Rome"),
        (call("weather", town="Rome"), "error: TypeError: weather() got an unexpected keyword argument 'town'"),
        (call("broken"), "error: RuntimeError: no network"),
        (call("slow", city="Rome"), "error: slow took longer than 0.05 s"),
        ("<tool_call>{'name'}</tool_call>", "error: the call is not valid: JSON is malformed"),
    ],
)
async def test_errors_of_tools_are_shown_to_the_policy(turn: str, answer: str) -> None:
    toolbox = Toolbox(
        [
            ToolConfig(name="weather", function=f"{HERE}:weather"),
            ToolConfig(name="slow", function=f"{HERE}:slow_weather", timeout_s=0.05),
            ToolConfig(name="broken", function=f"{HERE}:broken"),
            ToolConfig(name="leaves", function=f"{HERE}:leaves"),
            ToolConfig(name="wind", function=f"{HERE}:async_tool"),
        ]
    )
    assert (await toolbox.answer_call(turn)).startswith(answer)


async def test_waiting_for_a_call_slot_does_not_count_towards_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_server.workflows.multi_turn.MAX_CONCURRENT_CALLS", 1, raising=False)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    toolbox = Toolbox([ToolConfig(name="slow", function=f"{HERE}:takes_a_while", timeout_s=1.0)])
    answers = await asyncio.gather(*(toolbox.answer_call(call("slow")) for _ in range(15)))
    assert set(answers) == {"done"}


async def test_a_hung_tool_is_named_and_blocks_neither_other_threads_nor_its_next_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_server.workflows.multi_turn.MAX_CONCURRENT_CALLS", 1, raising=False)
    monkeypatch.setattr("rollout_server.workflows.multi_turn.MAX_HUNG_CALLS", 2, raising=False)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    hanging = Hanging()
    monkeypatch.setattr(f"{HERE}.broken", hanging)
    toolbox = Toolbox([ToolConfig(name="oracle", function=f"{HERE}:broken", timeout_s=0.05)])
    try:
        with structlog.testing.capture_logs() as logs:
            answers = [await toolbox.answer_call(call("oracle")) for _ in range(3)]
        await asyncio.wait_for(asyncio.to_thread(int), 5)  # as the feeder reads tasks
    finally:
        hanging.freed.set()
    assert answers[0] == answers[1] == "error: oracle took longer than 0.05 s"
    assert answers[2].startswith("error: oracle does not answer: 2 calls")
    assert [(entry["tool"], entry["hung"]) for entry in logs] == [("oracle", 1), ("oracle", 2)]
    async with asyncio.timeout(5):
        while await toolbox.answer_call(call("oracle")) != "free":
            await asyncio.sleep(0.01)


def test_unclosed_call_tags_are_parsed_in_linear_time() -> None:
    started_s = time.monotonic()
    assert find_last_call("<tool_call>" * 100_000) is None
    assert find_last_call("<tool_call>1</tool_call>" + "<tool_call>" * 100_000) == "1"
    assert time.monotonic() - started_s < 2


async def test_tools_cannot_insert_control_tokens_into_observations() -> None:
    tokenizer = byte_tokenizer_with_start()
    config = MultiTurnConfig(
        observation=f"{CONTROL}[{{result}}]",
        tools=[ToolConfig(name="weather", function=f"{HERE}:says_control_token")],
    )
    sample = await play(lambda _: MultiTurn(tokenizer, config), [call("weather"), "It rains."])
    turn = sample.turns[1]
    observed = sample.token_ids()[turn.start : turn.end].tolist()
    assert tokenizer.decode(observed) == f"{CONTROL}[{says_control_token()}]"
    assert [token for token in observed if token > 255] == [tokenizer.encode(CONTROL)[1]]  # from the template
    assert tokenizer.encode("x")[0] > 255  # a prompt starts with a control token


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 4 / 8", "1.5"),
        ("-2 ** 2", "-4"),
        ("7 // 2", "3"),
        ("10 / 5", "2"),
        ("9 % 4", "1"),
    ],
)
def test_the_calculator_does_arithmetic(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "x",
        "'a' * 9",
        "True",
        "2 ** 1000",
        "9 ** 9 ** 9",
        "1 / 0",
        "1 +",
        "(-8) ** 0.5",
        "1" * 300,
        "(" * 100 + ")" * 100,
        "[1][0]",
        "(lambda: 1)()",
    ],
)
def test_the_calculator_rejects_everything_else(expression: str) -> None:
    with pytest.raises(ValueError):
        calculator(expression)


async def test_a_custom_workflow_is_loaded_by_module_and_attribute() -> None:
    def load_example(tokenizer: Tokenizer) -> Workflow:
        return make_workflow(RolloutConfig(workflow="examples.ask_twice:AskTwice"), tokenizer)

    sample = await play(load_example, ["4", "5"])
    assert sample.text == "5"
    assert bytes(token for token in sample.token_ids().tolist() if token != STOP) == b"4\nAre you sure? 5"


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ("several_turns", "no workflow 'several_turns'"),
        ("nowhere:Mine", "cannot be imported"),
        ("tests.unit.rollout_server.workflows.test_workflows:weather", "method run"),
    ],
)
def test_an_invalid_workflow_is_refused(workflow: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_workflow(RolloutConfig(workflow=workflow), ByteTokenizer())


def test_an_unknown_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weather.*no tool 'rain'"):
        Toolbox([ToolConfig(name="weather", function="rain")])
