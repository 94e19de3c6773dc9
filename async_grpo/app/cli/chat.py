"""`async-grpo chat`: talk to a policy in the terminal.

    line --> Conversation --> pieces of the reply, cleaned --> terminal --> who wrote it, and its reward if asked for

It waits for the line, then for the reply. What the policy writes is shown as text: control characters never reach the
terminal, and nothing in it is markup.
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

from async_grpo.app.cli.common import CheckpointPath, ConfigFile, Live, Override, PolicyOptions, RunDir, exit_with
from async_grpo.errors import ConfigError, DataError, EngineError, WaitTimeout
from async_grpo.utils.text import clean_text

if TYPE_CHECKING:
    from async_grpo.app.chat import ChatSession
    from async_grpo.app.evaluate.policy_source import Checkpoint, LiveRun
    from async_grpo.config import RunConfig
    from async_grpo.rewards.pool import RewardPool

N = TypeVar("N", int, float)

_OF_A_LINE = (ConfigError, DataError, EngineError, WaitTimeout)
"""What goes wrong with one line: the conversation goes on."""
HELP = """\
/answer TEXT        the reward of the last reply, TEXT being the reference answer
/temperature X      from here on; 0 is greedy
/max-tokens N       of a reply, from here on
/prompt             what the policy read, as it read it
/reset              forget what was said
/quit               leave (so does the end of the input)"""


def chat(
    config: ConfigFile = None,
    override: Override = None,
    run_dir: RunDir = None,
    checkpoint: CheckpointPath = None,
    live: Live = False,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Ask this and leave: the reply is all of stdout.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--answer", metavar="TEXT", help="With --prompt: the reference; the reward is shown.")
    ] = None,
    template: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="raw, qwen_r1, chat or a Jinja file; else that of the run's data.")
    ] = "",
    system: Annotated[str, typer.Option(help="What stands before everything; with a chat template.")] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=10.0, help="0 is greedy; else sampling.temperature.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply; else sampling.max_tokens.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same question then has the same reply.")] = None,
) -> None:
    """Talk to the policy of a checkpoint or of a run that is going on.

    Questions are written as the run's data writes its prompts. A policy that was trained on single questions is asked
    single questions: only a chat template (or a file of your own) has what was said before in it.
    """
    choice = PolicyOptions(config, override, run_dir, checkpoint, live)

    def work() -> int:
        if answer is not None and prompt is None:
            raise ConfigError("--answer goes with --prompt. In a conversation type /answer TEXT")
        run_config, policy = choice.policy()
        wishes = ChatOptions(template, system, temperature, max_tokens, seed)
        with asyncio.Runner() as runner:
            stack = AsyncExitStack()
            try:
                opened = _open(run_config, policy, wishes)
                parlour = runner.run(stack.enter_async_context(opened))
                if prompt is not None:
                    runner.run(parlour.ask(prompt))
                    if answer is not None:
                        runner.run(parlour.judge(answer))
                else:
                    _converse(runner, parlour)
            except KeyboardInterrupt:
                print()
            finally:
                runner.run(stack.aclose())
        return 0

    exit_with(work)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the user wants otherwise than the run has it."""

    template: str
    system: str
    temperature: float | None
    max_tokens: int | None
    seed: int | None


class ChatTerminal:
    """A conversation and the terminal it takes place in. Replies go to standard output, all else to standard error."""

    def __init__(
        self, config: RunConfig, policy: Checkpoint | LiveRun, talk: ChatSession, stack: AsyncExitStack
    ) -> None:
        self._config = config
        self._policy = policy
        self._stack = stack
        self._pool: RewardPool | None = None
        self.talk = talk

    def allow(self, max_tokens: int) -> None:
        """Let a reply have so many tokens. Raises ConfigError for more than the servers of a live run give."""
        if max_tokens > (most := most_tokens(self._config, self._policy)):
            raise ConfigError(
                f"{max_tokens} tokens are above {most}, the most that the run's servers give in one reply "
                "(rollout.http.max_tokens). Ask for less, or resume the run with a larger rollout.http.max_tokens"
            )
        self.talk.max_tokens = max_tokens

    async def ask(self, question: str) -> None:
        """Show the reply as it comes, then who wrote it."""
        async with aclosing(self.talk.ask(question)) as pieces:
            async for piece in pieces:
                sys.stdout.write(clean_text(piece))
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if (reply := self.talk.last) is not None:
            aside(f"[{self._author(reply.tokens_by_version)}, {reply.tokens} tokens, {reply.finish_reason}]")

    async def judge(self, answer: str) -> None:
        """Show the reward of the last reply."""
        from async_grpo.rewards.base import RewardInput
        from async_grpo.rewards.pool import RewardPool

        reply = self.talk.last
        if reply is None:
            raise DataError("there is no reply yet to judge. Ask something first")
        if self._pool is None:
            self._pool = await self._stack.enter_async_context(RewardPool(self._config.rewards))
        (verdict,) = await self._pool.judge([RewardInput(reply.text, answer, reply.prompt)])
        scores = ", ".join(f"{name} {score:g}" for name, score in verdict.scores.items())
        reward = f"cannot be judged: {verdict.reason}" if verdict.reward is None else f"{verdict.reward:g}"
        aside(clean_text(f"[reward {reward}{f' ({scores})' if scores else ''}]"))

    def _author(self, tokens_by_version: dict[int, int]) -> str:
        """The policy versions, in order."""
        from async_grpo.app.evaluate.policy_source import LiveRun

        if isinstance(self._policy, LiveRun):
            versions = sorted(tokens_by_version)
            return f"policy version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions)) or 'unknown'}"
        version = self._policy.version
        return f"{self._policy.path}" if version is None else f"policy version {version}"


@asynccontextmanager
async def _open(config: RunConfig, policy: Checkpoint | LiveRun, wishes: ChatOptions) -> AsyncIterator[ChatTerminal]:
    from async_grpo.app.chat import ChatSession, wording_of
    from async_grpo.app.evaluate.policy_source import open_policy
    from async_grpo.data.tokenizer import load_tokenizer

    async with AsyncExitStack() as stack:
        opening = open_policy(config, policy, "chat", config.eval.timeout_s, aside)
        sampler, folder = await stack.enter_async_context(opening)
        tokenizer = load_tokenizer(folder)
        wording = wording_of(config, tokenizer, template=wishes.template, system=wishes.system)
        talk = ChatSession(config, sampler, tokenizer, wording)
        talk.temperature = talk.temperature if wishes.temperature is None else wishes.temperature
        talk.seed = wishes.seed
        parlour = ChatTerminal(config, policy, talk, stack)
        parlour.allow(wishes.max_tokens or min(talk.max_tokens, most_tokens(config, policy)))
        yield parlour


def most_tokens(config: RunConfig, policy: Checkpoint | LiveRun) -> int:
    """That a reply may have, whatever the policy's own room for it is."""
    from async_grpo.app.evaluate.policy_source import LiveRun

    return config.rollout.http.max_tokens if isinstance(policy, LiveRun) else sys.maxsize


def _converse(runner: asyncio.Runner, parlour: ChatTerminal) -> None:
    """Line after line, until the input ends."""
    memory = "it remembers what was said" if parlour.talk.remembers else "every question stands for itself"
    aside(f"Ask. /help lists the commands, /quit leaves; {memory}.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        try:
            if line.startswith("/"):
                _obey(line, runner, parlour)
            elif line:
                runner.run(parlour.ask(line))
        except _OF_A_LINE as error:
            aside(clean_text(str(error)))


def _obey(line: str, runner: asyncio.Runner, parlour: ChatTerminal) -> None:
    """A command. Raises ConfigError for one that is none."""
    word, _, rest = line.partition(" ")
    talk = parlour.talk
    match word:
        case "/help":
            aside(HELP)
        case "/reset":
            talk.reset()
            aside("forgotten")
        case "/prompt":
            aside(clean_text(talk.last.prompt) if talk.last is not None else "nothing was asked yet")
        case "/answer":
            runner.run(parlour.judge(rest.strip()))
        case "/temperature":
            talk.temperature = _number(rest, float, least=0.0, most=10.0)
        case "/max-tokens":
            parlour.allow(_number(rest, int, least=1, most=1 << 20))
        case _:
            raise ConfigError(f"there is no command {word}. /help lists them")


def _number(text: str, kind: Callable[[str], N], *, least: N, most: N) -> N:
    try:
        value = kind(text.strip())
        if least <= value <= most:
            return value
    except ValueError:
        pass  # said below
    raise ConfigError(f"{text.strip()!r} is not a number from {least} to {most}")


def aside(text: str) -> None:
    """What is not the policy's."""
    Console(stderr=True).print(escape(text), style="dim", highlight=False, soft_wrap=True)
