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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from async_grpo.cli.exits import exit_with
from async_grpo.errors import ConfigError, DataError
from async_grpo.telemetry.escape import clean_text

if TYPE_CHECKING:
    from async_grpo.config import RunConfig
    from async_grpo.launch.policies import Checkpoint, LiveRun
    from async_grpo.rewards.pool import RewardPool
    from rollout_server.conversation import Conversation

N = TypeVar("N", int, float)

HELP = """\
/answer TEXT        the reward of the last reply, TEXT being the reference answer
/temperature X      from here on; 0 is greedy
/max-tokens N       of a reply, from here on
/prompt             what the policy read, as it read it
/reset              forget what was said
/quit               leave (so does the end of the input)"""


def chat(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Of the run, such as configs/quickstart.yaml")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="As the run was started; may be repeated."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="runs/NAME instead of CONFIG and -o.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A Hugging Face folder or a checkpoint of a run; else the run's final one."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask the rollout servers of a run that is going on.")] = False,
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
    from async_grpo.launch.policies import chosen_run, find_checkpoint, find_live

    def work() -> int:
        if live and checkpoint is not None:
            raise ConfigError("--live and --checkpoint are two policies. Give one of them")
        if answer is not None and prompt is None:
            raise ConfigError("--answer goes with --prompt. In a conversation type /answer TEXT")
        policy: Checkpoint | LiveRun
        if live:
            policy = asyncio.run(find_live(config, override or [], run_dir))
            run_config = policy.config
        else:
            run_config, folder = chosen_run(config, override or [], run_dir)
            policy = find_checkpoint(folder, checkpoint)
        wishes = Wishes(template, system, temperature, max_tokens, seed)
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
class Wishes:
    """What the user wants otherwise than the run has it."""

    template: str
    system: str
    temperature: float | None
    max_tokens: int | None
    seed: int | None


class Parlour:
    """A conversation and the terminal it takes place in. Replies go to standard output, all else to standard error."""

    def __init__(
        self, config: RunConfig, policy: Checkpoint | LiveRun, talk: Conversation, stack: AsyncExitStack
    ) -> None:
        self._config = config
        self._policy = policy
        self._stack = stack
        self._pool: RewardPool | None = None
        self.talk = talk

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
        from async_grpo.rewards.item import Item
        from async_grpo.rewards.pool import RewardPool

        reply = self.talk.last
        if reply is None:
            raise DataError("there is no reply yet to judge. Ask something first")
        if self._pool is None:
            self._pool = await self._stack.enter_async_context(RewardPool(self._config.rewards))
        (verdict,) = await self._pool.judge([Item(reply.text, answer, reply.prompt)])
        scores = ", ".join(f"{name} {score:g}" for name, score in verdict.scores.items())
        reward = f"cannot be judged: {verdict.reason}" if verdict.reward is None else f"{verdict.reward:g}"
        aside(clean_text(f"[reward {reward}{f' ({scores})' if scores else ''}]"))

    def _author(self, tokens_by_version: dict[int, int]) -> str:
        """The policy versions, in order."""
        from async_grpo.launch.policies import LiveRun

        if isinstance(self._policy, LiveRun):
            versions = sorted(tokens_by_version)
            return f"policy version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions)) or 'unknown'}"
        version = self._policy.version
        return f"{self._policy.path}" if version is None else f"policy version {version}"


@asynccontextmanager
async def _open(config: RunConfig, policy: Checkpoint | LiveRun, wishes: Wishes) -> AsyncIterator[Parlour]:
    from async_grpo.data.source import load_tokenizer
    from async_grpo.data.wording import wording_of
    from async_grpo.launch.policies import open_policy
    from rollout_server.conversation import Conversation

    async with AsyncExitStack() as stack:
        opening = open_policy(config, policy, "chat", config.eval.timeout_s, aside)
        sampler, folder = await stack.enter_async_context(opening)
        tokenizer = load_tokenizer(folder)
        wording = wording_of(config, tokenizer, template=wishes.template, system=wishes.system)
        talk = Conversation(config, sampler, tokenizer, wording)
        talk.temperature = talk.temperature if wishes.temperature is None else wishes.temperature
        talk.max_tokens, talk.seed = wishes.max_tokens or talk.max_tokens, wishes.seed
        yield Parlour(config, policy, talk, stack)


def _converse(runner: asyncio.Runner, parlour: Parlour) -> None:
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
        except (ConfigError, DataError) as error:  # of this line; the conversation goes on
            aside(clean_text(str(error)))


def _obey(line: str, runner: asyncio.Runner, parlour: Parlour) -> None:
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
            talk.max_tokens = _number(rest, int, least=1, most=1 << 20)
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
