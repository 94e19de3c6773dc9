"""A conversation with tools: the policy writes, the tool that it calls answers, the policy goes on.

    prompt -> turn -> <tool_call>? -- yes --> observation -> turn -> ...
                           +-------- no ---> the completion is whole

A call is JSON between tags, as Qwen and Hermes models write it:

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>

An error in a call is the tool's answer, so that the policy may try again. Tokens of observations get no gradient. A
conversation that was interrupted goes on where it was, and no tool is called again for an answer that is recorded.

The built-in tool, `calculator`, parses an arithmetic expression and computes it; it never evaluates it as Python.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from async_grpo.config.rollout import MultiTurnConfig, ToolConfig
from async_grpo.data.tokenizer import Tokenizer
from async_grpo.errors import ConfigError
from async_grpo.plugins import is_plugin, load_plugin
from async_grpo.wire import Sample, Task
from rollout_server.workflows.session import SampleSession

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
LONGEST_EXPRESSION = 200
LARGEST_EXPONENT = 64
LARGEST_NUMBER = 10**100

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


class Toolbox:
    """The tools that the policy of a run may call."""

    def __init__(self, tools: Sequence[ToolConfig]) -> None:
        """Raises ConfigError for a function that does not exist."""
        self._tools = {tool.name: (_function(tool), tool.timeout_s) for tool in tools}

    async def answer(self, turn: str) -> str:
        """The answer to the last call in `turn`, or the text of its error. Waits for the tool, at most its timeout."""
        try:
            call = msgspec.json.decode(_CALL.findall(turn)[-1], type=ToolCall)
        except msgspec.MsgspecError as error:
            return f"error: the call is not valid: {error}"
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self._tools)}"
        function, timeout_s = self._tools[call.name]
        try:
            async with asyncio.timeout(timeout_s):
                return str(await _call(function, call.arguments))
        except TimeoutError:
            return f"error: {call.name} took longer than {timeout_s:g} s"
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"


async def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call the tool. A plain function runs in a thread, so that it does not hold the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


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
        self._tools = Toolbox(config.tools)

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """A sample with the whole conversation. Its text includes the answers of tools. Raises EngineError."""
        text = ""
        for calls in range(self._config.max_calls + 1):
            turn = await session.turn()
            said = self._tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            text += said
            wants_more = turn.finish_reason == "stop" and _CALL.search(said)
            if not wants_more or calls == self._config.max_calls or session.tokens_left <= 0:
                break
            text += await self._observe(session, said)
            if session.tokens_left <= 0:
                break
        return session.sample(text)

    async def _observe(self, session: SampleSession, said: str) -> str:
        async def answer() -> list[int]:
            result = (await self._tools.answer(said))[: self._config.max_result_chars]
            return self._tokenizer.encode(self._config.observation.replace("{result}", result))

        return self._tokenizer.decode((await session.observe(answer)).tolist(), skip_special_tokens=True)
