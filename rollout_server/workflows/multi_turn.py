"""Conversation with tools: the policy writes, the tool that it calls answers, the policy continues.

    prompt -> turn -> <tool_call>? -- yes --> observation -> turn -> ...
                           +-------- no ---> the completion is complete

A call is JSON between tags, in the format of Qwen and Hermes models:

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>

The answer to a failed call is its error, so that the policy can try again. Tokens of observations get no gradient. An
interrupted conversation resumes where it was, and recorded answers are not requested from tools again.

A plain function runs in a separate thread, and its timeout starts with that thread: waiting for other calls of the tool
does not count. A call that exceeds its timeout keeps its thread, because Python cannot end a thread. It is logged, and
its slot goes to the next call. A tool with MAX_HUNG_CALLS hanging calls is not called until one of them returns. No
thread is shared with the rest of the server, which continues to read tasks while tools hang.

The built-in tool `calculator` parses an arithmetic expression and computes it; it never evaluates it as Python.
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
MAX_CONCURRENT_CALLS = 32
"""Maximum concurrent calls per tool, without those that hang."""
MAX_HUNG_CALLS = 32
"""Maximum hanging calls per tool, each of which occupies a thread."""
MAX_EXPRESSION_CHARS = 200
MAX_EXPONENT = 64
MAX_NUMBER = 10**100

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
    """Compute an arithmetic expression: numbers, + - * / // % **, brackets.

    Raises ValueError for anything else, for division by zero, and for numbers beyond 10^100.

    >>> calculator("(1 + 2) * 4 / 8")
    '1.5'
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, the limit is {MAX_EXPRESSION_CHARS}")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_bound(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _check_bound(_compute_power(_evaluate(left), _evaluate(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _check_bound(_BINARY[type(op)](_evaluate(left), _evaluate(right)))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _compute_power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"the exponent {exponent} is above {MAX_EXPONENT}")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("a root of a negative number")
    return result


def _check_bound(number: Number) -> Number:
    if abs(number) > MAX_NUMBER:
        raise ValueError("the number is beyond 10^100")
    return number


_BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator}


class ToolCall(msgspec.Struct, frozen=True):
    """Decoded call of the policy."""

    name: str
    arguments: dict[str, Any] = {}


def find_last_call(turn: str) -> str | None:
    """JSON of the last complete call in the text; None if there is none. Takes time linear in the text.

    >>> find_last_call("<tool_call>1</tool_call> and <tool_call>2</tool_call>")
    '2'
    """
    call = None
    position = 0
    while (begin := turn.find(CALL_BEGIN, position)) >= 0:
        begin += len(CALL_BEGIN)
        end = turn.find(CALL_END, begin)
        if end < 0:
            break
        call = turn[begin:end]
        position = end + len(CALL_END)
    return call


class ToolHangs(Exception):
    """A tool did not return in time, or was not called because too many of its calls hang."""


class Tool:
    """One tool, and the threads of its calls."""

    def __init__(self, config: ToolConfig) -> None:
        """Raises ConfigError for a function that does not exist."""
        self._config = config
        self._function = _load_function(config)
        self._call_slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._hung_calls = 0

    async def call(self, arguments: dict[str, Any]) -> str:
        """Call the function and return its result as text. Raises ToolHangs, and the errors of the function."""
        if _is_async(self._function):
            result = self._function(**arguments)
        else:
            async with self._call_slots:
                result = await self._call_in_thread(arguments)
        # A plain function may also return an awaitable; only the event loop can await that.
        if inspect.isawaitable(result):
            try:
                async with asyncio.timeout(self._config.timeout_s) as clock:
                    result = await result
            except TimeoutError:
                if clock.expired():
                    raise self._timeout_error() from None
                raise  # a TimeoutError of the function itself
        return str(result)

    async def _call_in_thread(self, arguments: dict[str, Any]) -> Any:
        if self._hung_calls >= MAX_HUNG_CALLS:
            raise ToolHangs(f"{self._config.name} does not answer: {self._hung_calls} calls of it have not returned")
        outcome = _start_thread(self._config.name, self._function, arguments)
        try:
            await asyncio.wait([outcome], timeout=self._config.timeout_s)
        finally:
            if not outcome.done():  # the timeout has passed, or the sample was cancelled
                self._count_hung_call(outcome)
        if not outcome.done():
            raise self._timeout_error()
        value, error = outcome.result()
        if error is not None:
            raise error
        return value

    def _count_hung_call(self, outcome: asyncio.Future[Outcome]) -> None:
        self._hung_calls += 1
        log.warning(
            "a tool has not returned and keeps its thread: add timeouts to its blocking calls",
            tool=self._config.name,
            function=self._config.function,
            hung=self._hung_calls,
        )

        def count_return(_: object) -> None:
            self._hung_calls -= 1

        outcome.add_done_callback(count_return)

    def _timeout_error(self) -> ToolHangs:
        return ToolHangs(f"{self._config.name} took longer than {self._config.timeout_s:g} s")


Outcome = tuple[Any, BaseException | None]
"""Result and error of a call; the error is None if it returned."""


def _start_thread(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> asyncio.Future[Outcome]:
    """Call the function in a new thread, which is running when this returns."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Outcome] = loop.create_future()

    def run() -> None:
        result: Outcome
        try:
            result = function(**arguments), None
        except BaseException as error:  # also SystemExit, which argparse in a tool raises for invalid arguments
            result = None, error
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(outcome.set_result, result)

    # A daemon thread, because Python waits for all others at exit: a hanging tool would keep the process alive.
    threading.Thread(target=run, name=f"tool-{name}", daemon=True).start()
    return outcome


def _is_async(function: Callable[..., Any]) -> bool:
    """True for a coroutine function, and for an object whose `__call__` is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Toolbox:
    """Tools that the policy may call."""

    def __init__(self, tools: Sequence[ToolConfig]) -> None:
        """Raises ConfigError for a function that does not exist."""
        self._tools = {tool.name: Tool(tool) for tool in tools}

    async def answer_call(self, turn: str) -> str:
        """Execute the last call in `turn`; returns the tool's answer, or the text of an error.

        Waits for a call slot of the tool, then at most its timeout.
        """
        try:
            call = msgspec.json.decode(find_last_call(turn) or "", type=ToolCall)
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


def _load_function(tool: ToolConfig) -> Callable[..., Any]:
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
        """Return a sample with the whole conversation. Its text includes the answers of tools. Raises EngineError."""
        text = ""
        for calls in range(self._config.max_calls + 1):
            turn = await session.turn()
            turn_text = self._tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            text += turn_text

            has_call = turn.finish_reason == "stop" and find_last_call(turn_text) is not None
            if not has_call or calls == self._config.max_calls or session.tokens_left <= 0:
                break
            text += await self._observe_answer(session, turn_text)
            if session.tokens_left <= 0:
                break
        return session.sample(text)

    async def _observe_answer(self, session: SampleSession, turn_text: str) -> str:
        """Append the answer to the call in `turn_text`, and return its text."""

        async def encode_answer() -> list[int]:
            answer = await self._tools.answer_call(turn_text)
            return self._observations.encode(answer[: self._config.max_result_chars])

        # Decode the tokens of the session instead of the answer: they may be truncated, or played back from the record.
        tokens = await session.observe(encode_answer)
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
