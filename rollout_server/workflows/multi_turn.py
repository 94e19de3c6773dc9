"""A conversation with tools: the policy writes, the tool that it calls answers, the policy goes on.

    prompt -> turn -> <tool_call>? -- yes --> observation -> turn -> ...
                           +-------- no ---> the completion is whole

A call is JSON between tags, as Qwen and Hermes models write it:

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>

An error in a call is the tool's answer, so that the policy may try again. Tokens of observations get no gradient. A
conversation that was interrupted goes on where it was, and no tool is called again for an answer that is recorded.

A plain function runs in a thread of its own, and its timeout starts with that thread: waiting for other calls of the
tool does not count. A call that has not returned by then keeps its thread, because a thread cannot be ended. It is
named in the log, and its place goes to the next call. A tool of which MOST_HUNG calls hang is not called until one
returns. No thread is shared with the rest of the server, which goes on reading tasks whatever a tool does.

The built-in tool, `calculator`, parses an arithmetic expression and computes it; it never evaluates it as Python.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import structlog

from async_grpo.config.rollout import MultiTurnConfig, ToolConfig
from async_grpo.data.tokenizer import ObservationEncoder, Tokenizer
from async_grpo.errors import ConfigError
from async_grpo.plugins import is_plugin, load_plugin
from async_grpo.wire import Sample, Task
from rollout_server.workflows.session import SampleSession

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
MOST_THREADS = 32
"""Calls of one tool that run at once, those that hang not counted."""
MOST_HUNG = 32
"""Calls of one tool that may hang; as many threads of it are left at most."""
LONGEST_EXPRESSION = 200
LARGEST_EXPONENT = 64
LARGEST_NUMBER = 10**100

log = structlog.get_logger()

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """The value of an arithmetic expression: numbers, + - * / // % **, brackets.

    Raises ValueError for anything else, for division by zero, and for numbers beyond 10^100.

    >>> calculator("(1 + 2) * 4 / 8")
    '1.5'
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters, {LONGEST_EXPRESSION} are allowed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > LARGEST_EXPONENT:
        raise ValueError(f"the exponent {exponent} is beyond {LARGEST_EXPONENT}")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("a root of a negative number")
    return result


def _bounded(number: Number) -> Number:
    if abs(number) > LARGEST_NUMBER:
        raise ValueError("the number is beyond 10^100")
    return number


_BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator}


class ToolCall(msgspec.Struct, frozen=True):
    """A call as the policy wrote it."""

    name: str
    arguments: dict[str, Any] = {}


def last_call(turn: str) -> str | None:
    """The JSON of the last complete call in the text; None if there is none. Takes time linear in the text.

    >>> last_call("<tool_call>1</tool_call> and <tool_call>2</tool_call>")
    '2'
    """
    call, place = None, 0
    while (begin := turn.find(CALL_BEGIN, place)) >= 0:
        begin += len(CALL_BEGIN)
        end = turn.find(CALL_END, begin)
        if end < 0:
            break
        call, place = turn[begin:end], end + len(CALL_END)
    return call


class ToolHangs(Exception):
    """A tool did not return in time, or is not called because too many of its calls hang."""


class Tool:
    """One tool, with the threads of its calls."""

    def __init__(self, config: ToolConfig) -> None:
        """Raises ConfigError for a function that does not exist."""
        self._config = config
        self._function = _function(config)
        self._room = asyncio.Semaphore(MOST_THREADS)
        self._hung = 0

    async def call(self, arguments: dict[str, Any]) -> str:
        """The result as text. Raises ToolHangs, and what the function raises."""
        if _is_async(self._function):
            result = self._function(**arguments)
        else:
            async with self._room:
                result = await self._call_in_thread(arguments)
        if inspect.isawaitable(result):
            try:
                async with asyncio.timeout(self._config.timeout_s) as clock:
                    result = await result
            except TimeoutError:
                if clock.expired():
                    raise self._took_too_long() from None
                raise
        return str(result)

    async def _call_in_thread(self, arguments: dict[str, Any]) -> Any:
        if self._hung >= MOST_HUNG:
            raise ToolHangs(f"{self._config.name} does not answer: {self._hung} calls of it have not returned")
        outcome = _start_thread(self._config.name, self._function, arguments)
        try:
            await asyncio.wait([outcome], timeout=self._config.timeout_s)
        finally:
            if not outcome.done():  # it took too long, or the sample was cancelled
                self._count_hung(outcome)
        if not outcome.done():
            raise self._took_too_long()
        value, error = outcome.result()
        if error is not None:
            raise error
        return value

    def _count_hung(self, outcome: asyncio.Future[Outcome]) -> None:
        self._hung += 1
        log.warning(
            "a tool has not returned and keeps its thread: give what can hang in it a timeout",
            tool=self._config.name,
            function=self._config.function,
            hung=self._hung,
        )

        def returned(_: object) -> None:
            self._hung -= 1

        outcome.add_done_callback(returned)

    def _took_too_long(self) -> ToolHangs:
        return ToolHangs(f"{self._config.name} took longer than {self._config.timeout_s:g} s")


Outcome = tuple[Any, BaseException | None]
"""What a call has returned, or what it has raised."""


def _start_thread(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> asyncio.Future[Outcome]:
    """Call the function in a new thread, which runs when this returns. A daemon, so that a process can end while a tool
    hangs: Python waits for all other threads."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Outcome] = loop.create_future()

    def run() -> None:
        result: Outcome
        try:
            result = function(**arguments), None
        except BaseException as error:  # SystemExit too: a tool that parses arguments raises it for wrong ones
            result = None, error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(outcome.set_result, result)

    threading.Thread(target=run, name=f"tool-{name}", daemon=True).start()
    return outcome


def _is_async(function: Callable[..., Any]) -> bool:
    """True for a coroutine function, and for an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Toolbox:
    """The tools that the policy of a run may call."""

    def __init__(self, tools: Sequence[ToolConfig]) -> None:
        """Raises ConfigError for a function that does not exist."""
        self._tools = {tool.name: Tool(tool) for tool in tools}

    async def answer(self, turn: str) -> str:
        """The answer to the last call in `turn`, or the text of its error. Waits for the tool: for a place among its
        calls, then at most its timeout."""
        try:
            call = msgspec.json.decode(last_call(turn) or "", type=ToolCall)
        except msgspec.MsgspecError as error:
            return f"error: the call is not valid: {error}"
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self._tools)}"
        try:
            return await self._tools[call.name].call(call.arguments)
        except ToolHangs as error:
            return f"error: {error}"
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}"


def _function(tool: ToolConfig) -> Callable[..., Any]:
    key = f"rollout.multi_turn.tools ({tool.name})"
    if tool.function in _BUILTIN:
        return _BUILTIN[tool.function]
    if not is_plugin(tool.function):
        raise ConfigError(
            f"{key}: there is no tool {tool.function!r}. Use one of {', '.join(_BUILTIN)}, or module:attribute"
        )
    function: Callable[..., Any] = load_plugin(tool.function, key=key)
    return function


class MultiTurn:
    """The `multi_turn` workflow."""

    def __init__(self, tokenizer: Tokenizer, config: MultiTurnConfig) -> None:
        """Raises ConfigError for a tool that does not exist."""
        self._tokenizer = tokenizer
        self._config = config
        self._observations = ObservationEncoder(tokenizer, config.observation)
        self._tools = Toolbox(config.tools)

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """A sample with the whole conversation. Its text includes the answers of tools. Raises EngineError."""
        text = ""
        for calls in range(self._config.max_calls + 1):
            turn = await session.turn()
            said = self._tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            text += said
            wants_more = turn.finish_reason == "stop" and last_call(said) is not None
            if not wants_more or calls == self._config.max_calls or session.tokens_left <= 0:
                break
            text += await self._observe(session, said)
            if session.tokens_left <= 0:
                break
        return session.sample(text)

    async def _observe(self, session: SampleSession, said: str) -> str:
        async def answer() -> list[int]:
            result = (await self._tools.answer(said))[: self._config.max_result_chars]
            return self._observations.encode(result)

        return self._tokenizer.decode((await session.observe(answer)).tolist(), skip_special_tokens=True)
