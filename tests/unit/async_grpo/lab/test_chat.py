"""`async-grpo chat` without vLLM: what is asked, how a reply is shown, the commands of a conversation."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.cli.chat import ChatOptions, ChatTerminal, _converse, _open
from async_grpo.errors import ConfigError, DataError, EngineError, WaitTimeout
from async_grpo.lab.chat import ChatSession, PlainPrompt, TemplatePrompt, make_prompt
from async_grpo.lab.evaluate.policy_source import Checkpoint, LiveRun
from rollout_server.engines.base import GenerationRequest
from tests.support.http_fakes import Letters, script_of, scripted
from tests.support.rollout_fakes import config_of

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]not red[/red]\u202e\r\x9b31m"


async def terminal_of(said: str, **changes: Any) -> tuple[ChatTerminal, list[GenerationRequest]]:
    """A conversation with a policy that always says the same, and what it was asked."""
    asked: list[GenerationRequest] = []

    def script(request: GenerationRequest) -> list[int]:
        asked.append(request)
        return [*said.encode(), 255]

    prompt = changes.pop("prompt", PlainPrompt("Q: {prompt}", Letters()))
    config = config_of(**{"sampling": {"max_tokens": 200}, **changes})
    session = ChatSession(config, await scripted(script), Letters(), prompt)
    return ChatTerminal(config, Checkpoint(Path("hf"), 7), session, AsyncExitStack()), asked


async def test_a_reply_is_shown_with_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, asked = await terminal_of("fünf")
    await terminal.ask("2+3")
    shown = capsys.readouterr()
    assert shown.out == "fünf\n"
    assert "[policy version 7, 6 tokens, stop]" in shown.err
    assert bytes(asked[0].prompt[1:]) == b"Q: 2+3"


async def test_what_the_policy_writes_never_reaches_the_terminal_as_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal, _ = await terminal_of(HOSTILE)
    await terminal.ask("hi")
    assert capsys.readouterr().out == "[2J]0;owned[red]not red[/red]31m\n"


async def test_only_a_chat_template_has_what_was_said_before() -> None:
    terminal, asked = await terminal_of("yes")
    for _ in range(2):
        await terminal.ask("same")
    assert list(asked[0].prompt) == list(asked[1].prompt) and not terminal.session.has_history
    terminal, asked = await terminal_of("yes", prompt=TemplatePrompt("chat", Letters(), ""))
    assert terminal.session.has_history
    for question in ("one", "two"):
        await terminal.ask(question)
    assert bytes(asked[1].prompt) == b"<user>one<assistant>yes<user>two<assistant>"
    terminal.session.reset()
    await terminal.ask("three")
    assert bytes(asked[2].prompt) == b"<user>three<assistant>"


async def test_sampling_follows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, asked = await terminal_of("a long reply")
    terminal.session.temperature, terminal.session.max_tokens, terminal.session.seed = 0.0, 4, 11
    await terminal.ask("hi")
    assert (asked[0].temperature, asked[0].max_tokens, asked[0].seed) == (0.0, 4, 11)
    assert "4 tokens, length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "fault"),
    [("ü", "UnicodeEncodeError"), ("x" * 3000, r"3004 tokens.*max_model_len \(256\).*/reset")],
    ids=["no tokens", "too long"],
)
async def test_what_cannot_be_a_prompt_is_said_and_the_conversation_goes_on(question: str, fault: str) -> None:
    terminal, _ = await terminal_of("yes")
    with pytest.raises(DataError, match=fault):
        await terminal.ask(question)
    await terminal.ask("fine")


def test_the_commands_of_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    with asyncio.Runner() as runner:
        terminal, _ = runner.run(terminal_of("yes"))
        terminal.handle_command("/temperature 0.5", runner)
        terminal.handle_command("/max-tokens 3", runner)
        assert (terminal.session.temperature, terminal.session.max_tokens) == (0.5, 3)
        runner.run(terminal.ask("hi"))
        for command, answer in (("/prompt", "Q: hi"), ("/help", "/quit")):
            terminal.handle_command(command, runner)
            assert answer in capsys.readouterr().err
        for wrong in ("/temperature hot", "/max-tokens 0", "/no-such"):
            with pytest.raises(ConfigError):
                terminal.handle_command(wrong, runner)
        terminal.handle_command("/reset", runner)
        with pytest.raises(DataError, match="no reply"):
            terminal.handle_command("/answer 4", runner)


def test_a_server_that_fails_ends_the_line_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "two", "three", "/quit"])
    failures: list[Exception] = [EngineError("the server has left"), WaitTimeout("completion chat-2", 1.0)]
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    with asyncio.Runner() as runner:
        terminal, asked = runner.run(terminal_of("yes"))
        ask = terminal.ask

        async def sometimes(question: str) -> None:
            if failures:
                raise failures.pop(0)
            await ask(question)

        monkeypatch.setattr(terminal, "ask", sometimes)
        _converse(runner, terminal)
    shown = capsys.readouterr()
    assert "the server has left" in shown.err and "waited 1 s for completion chat-2" in shown.err
    assert (shown.out, len(asked)) == ("yes\n", 1)


async def test_a_live_run_is_asked_for_no_more_tokens_than_its_servers_give(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await scripted(script_of("yes"))

    @asynccontextmanager
    async def policy(*_: object) -> Any:
        yield engine, Path("hf")

    monkeypatch.setattr("async_grpo.lab.evaluate.policy_source.open_policy", policy)
    monkeypatch.setattr("async_grpo.data.tokenizer.load_tokenizer", lambda _: Letters())
    config = config_of(sampling={"max_tokens": 200}, rollout={"http": {"max_tokens": 100}})
    live, options = LiveRun(config, {}), ChatOptions()
    async with _open(config, live, options) as terminal:
        assert terminal.session.max_tokens == 100
        terminal.set_max_tokens(99)
        with pytest.raises(ConfigError, match=r"101 .*rollout\.http\.max_tokens \(100\)"):
            terminal.set_max_tokens(101)
        assert terminal.session.max_tokens == 99
    with pytest.raises(ConfigError, match=r"101 .*rollout\.http\.max_tokens"):
        async with _open(config, live, replace(options, max_tokens=101)):
            pass
    async with _open(config, Checkpoint(Path("hf"), 1), replace(options, max_tokens=101)) as terminal:
        assert terminal.session.max_tokens == 101


async def test_the_reward_of_a_reply_is_shown_for_an_expected_answer(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, _ = await terminal_of("<answer>5</answer>")
    async with terminal._stack:
        await terminal.ask("2+3")
        await terminal.judge("5")
        await terminal.judge("6")
    shown = capsys.readouterr().err
    assert "[reward 1 (answer_tag 1)]" in shown and "[reward 0 (answer_tag 0)]" in shown


def test_the_template_is_that_of_the_data_unless_one_is_named() -> None:
    config = config_of(data={"template": "{prompt} = ?"})
    assert make_prompt(config, Letters()).render([], "1+1")[0] == "1+1 = ?"
    assert make_prompt(config, Letters(), template="chat").render([], "1+1")[0] == "<user>1+1<assistant>"
    with pytest.raises(ConfigError, match=r"--system .*--template chat"):
        make_prompt(config, Letters(), system="be brief")
