"""`async-grpo chat`: talk to a policy in the terminal.

    line --> ChatSession --> pieces of the reply --> clean_text --> stdout;  its author and reward --> stderr

It waits for a line, then for the reply. Replies are shown as plain text: control characters never reach the terminal,
and markup is not interpreted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from async_grpo.app.cli.common import (
    CheckpointPath,
    Live,
    PolicyOptions,
    RunConfigFile,
    RunDir,
    RunOverride,
    exit_with_code,
)
from async_grpo.errors import ConfigError, DataError, EngineError, WaitTimeout
from async_grpo.utils.text import clean_text

if TYPE_CHECKING:
    from async_grpo.config import RunConfig
    from async_grpo.lab.chat import ChatSession
    from async_grpo.lab.evaluate.policy_source import Checkpoint, LiveRun
    from async_grpo.rewards.pool import RewardPool

N = TypeVar("N", int, float)

Question = Annotated[
    str | None,
    typer.Option(
        "--prompt", metavar="TEXT", help="Ask one question, print only the reply to standard output, and exit."
    ),
]
Answer = Annotated[
    str | None,
    typer.Option(
        "--answer", metavar="TEXT", help="--prompt: also show the reward of the reply for this reference answer."
    ),
]
TemplateName = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE", help="Prompt template: raw, qwen_r1, chat or a Jinja file (default: that of the data)."
    ),
]
System = Annotated[str, typer.Option(help="System message, for templates that have one.")]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, max=10.0, help="Sampling temperature; 0 is greedy (default: sampling.temperature)."),
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum length of a reply, in tokens (default: sampling.max_tokens).")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of sampling, for reproducible replies.")]

_LINE_ERRORS = (ConfigError, DataError, EngineError, WaitTimeout)
"""Errors after which the conversation continues with the next line."""
HELP = """\
/answer TEXT        show the reward of the last reply for the reference answer TEXT
/temperature X      set the temperature; 0 is greedy
/max-tokens N       set the maximum length of a reply, in tokens
/prompt             show the last prompt, as the policy received it
/reset              start a new conversation
/quit               leave (or end the input, with Ctrl-D)"""


@exit_with_code()
def chat(
    config: RunConfigFile = None,
    override: RunOverride = None,
    run_dir: RunDir = None,
    checkpoint: CheckpointPath = None,
    live: Live = False,
    prompt: Question = None,
    answer: Answer = None,
    template: TemplateName = "",
    system: System = "",
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
) -> None:
    """Talk to the policy of a checkpoint or of a run in progress.

    Questions are formatted as the prompts of the run's data. A policy that was trained on single questions is asked
    single questions: only a chat template or your own template file includes the conversation so far.
    """
    policy = PolicyOptions(config, override, run_dir, checkpoint, live)
    options = ChatOptions(template, system, temperature, max_tokens, seed)
    _chat(policy, options, prompt, answer)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Values that override the run's configuration; empty or None keeps the run's value."""

    template: str = ""
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class ChatTerminal:
    """A chat session and its terminal. Replies go to standard output, everything else to standard error."""

    def __init__(
        self, config: RunConfig, policy: Checkpoint | LiveRun, session: ChatSession, stack: AsyncExitStack
    ) -> None:
        """`stack` closes the reward pool, which the first `judge` opens."""
        self._config = config
        self._policy = policy
        self._stack = stack
        self._pool: RewardPool | None = None
        self.session = session

    @property
    def token_limit(self) -> int:
        """Maximum length of a reply, in tokens, of a live run's servers; unlimited for a checkpoint."""
        from async_grpo.lab.evaluate.policy_source import LiveRun

        if isinstance(self._policy, LiveRun):
            return self._config.rollout.http.max_tokens
        return sys.maxsize

    def set_max_tokens(self, max_tokens: int) -> None:
        """Set the maximum length of a reply, in tokens. Raises ConfigError above the limit of a live run's servers."""
        limit = self.token_limit
        if max_tokens > limit:
            raise ConfigError(
                f"{max_tokens} tokens are above the limit of the run's servers, rollout.http.max_tokens ({limit}). "
                "Choose fewer, or resume the run with a larger rollout.http.max_tokens"
            )
        self.session.max_tokens = max_tokens

    async def ask(self, question: str) -> None:
        """Stream the reply to the terminal, then print its author. Raises the errors of `ChatSession.stream_reply`."""
        async with aclosing(self.session.stream_reply(question)) as pieces:
            async for piece in pieces:
                print(clean_text(piece), end="", flush=True)
        print(flush=True)
        if (reply := self.session.last_reply) is not None:
            print_dimmed(f"[{self._author(reply.tokens_by_version)}, {reply.tokens} tokens, {reply.finish_reason}]")

    async def judge(self, answer: str) -> None:
        """Show the reward of the last reply for the reference `answer`. Raises DataError without a reply."""
        from async_grpo.rewards.base import RewardInput
        from async_grpo.rewards.pool import RewardPool

        reply = self.session.last_reply
        if reply is None:
            raise DataError("there is no reply to judge yet. Ask a question first")
        if self._pool is None:
            self._pool = await self._stack.enter_async_context(RewardPool(self._config.rewards))
        (result,) = await self._pool.judge([RewardInput(reply.text, answer, reply.prompt)])
        scores = ", ".join(f"{name} {score:g}" for name, score in result.scores.items())
        reward = f"cannot be judged: {result.reason}" if result.reward is None else f"{result.reward:g}"
        print_dimmed(clean_text(f"[reward {reward}{f' ({scores})' if scores else ''}]"))

    def handle_command(self, line: str, runner: asyncio.Runner) -> None:
        """Execute a line that starts with a slash. Raises ConfigError for an unknown command or an invalid value."""
        command, _, rest = line.partition(" ")
        session = self.session
        match command:
            case "/help":
                print_dimmed(HELP)
            case "/reset":
                session.reset()
                print_dimmed("new conversation")
            case "/prompt":
                reply = session.last_reply
                print_dimmed(clean_text(reply.prompt) if reply is not None else "no question has been asked yet")
            case "/answer":
                runner.run(self.judge(rest.strip()))
            case "/temperature":
                session.temperature = _parse_number(rest, float, minimum=0.0, maximum=10.0)
            case "/max-tokens":
                self.set_max_tokens(_parse_number(rest, int, minimum=1, maximum=1 << 20))
            case _:
                raise ConfigError(f"there is no command {command}. /help lists them")

    def _author(self, tokens_by_version: dict[int, int]) -> str:
        """Return the policy versions that wrote a reply, or the checkpoint's path if its version is unknown."""
        from async_grpo.lab.evaluate.policy_source import LiveRun

        if isinstance(self._policy, LiveRun):
            versions = sorted(tokens_by_version)
            return f"policy version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions)) or 'unknown'}"
        version = self._policy.version
        return f"{self._policy.path}" if version is None else f"policy version {version}"


def print_dimmed(text: str) -> None:
    """Print text that the policy did not write to standard error, dimmed."""
    Console(stderr=True).print(escape(text), style="dim", highlight=False, soft_wrap=True)


def _chat(choice: PolicyOptions, options: ChatOptions, prompt: str | None, answer: str | None) -> None:
    """Ask one question, or hold a conversation."""
    if answer is not None and prompt is None:
        raise ConfigError("--answer needs --prompt. In a conversation, use /answer TEXT")
    config, policy = choice.resolve_policy()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            terminal = runner.run(stack.enter_async_context(_open(config, policy, options)))
            if prompt is None:
                _converse(runner, terminal)
            else:
                runner.run(terminal.ask(prompt))
                if answer is not None:
                    runner.run(terminal.judge(answer))
        except KeyboardInterrupt:
            print()
        finally:
            runner.run(stack.aclose())


@asynccontextmanager
async def _open(config: RunConfig, policy: Checkpoint | LiveRun, options: ChatOptions) -> AsyncIterator[ChatTerminal]:
    from async_grpo.data.tokenizer import load_tokenizer
    from async_grpo.lab.chat import ChatSession, make_prompt
    from async_grpo.lab.evaluate.policy_source import open_policy

    async with AsyncExitStack() as stack:
        opening = open_policy(config, policy, "chat", config.eval.timeout_s, print_dimmed)
        sampler, folder = await stack.enter_async_context(opening)
        tokenizer = load_tokenizer(folder)
        prompt = make_prompt(config, tokenizer, template=options.template, system=options.system)
        session = ChatSession(config, sampler, tokenizer, prompt)
        if options.temperature is not None:
            session.temperature = options.temperature
        session.seed = options.seed
        terminal = ChatTerminal(config, policy, session, stack)
        terminal.set_max_tokens(options.max_tokens or min(session.max_tokens, terminal.token_limit))
        yield terminal


def _converse(runner: asyncio.Runner, terminal: ChatTerminal) -> None:
    """Process lines until the input ends."""
    memory = "remembers the conversation" if terminal.session.has_history else "reads every question on its own"
    print_dimmed(f"Ask a question. /help lists the commands, /quit leaves. The policy {memory}.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        try:
            if line.startswith("/"):
                terminal.handle_command(line, runner)
            elif line:
                runner.run(terminal.ask(line))
        except _LINE_ERRORS as error:
            print_dimmed(clean_text(str(error)))


def _parse_number(text: str, kind: Callable[[str], N], *, minimum: N, maximum: N) -> N:
    try:
        value = kind(text.strip())
        if minimum <= value <= maximum:
            return value
    except ValueError:
        pass  # reported below
    raise ConfigError(f"{text.strip()!r} is not a number from {minimum} to {maximum}")
