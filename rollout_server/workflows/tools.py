"""Tools that the policy may call, and how it calls them.

A call is JSON between tags, as Qwen and Hermes models write it:

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>

Whatever goes wrong is told to the policy as the answer: it may try again.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from async_grpo.config.rollout import ToolConfig
from async_grpo.errors import ConfigError
from async_grpo.plugins import is_plugin, load_plugin
from rollout_server.workflows.calculator import calculator

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator}


class ToolCall(msgspec.Struct, frozen=True):
    """What the policy wrote."""

    name: str
    arguments: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a run, by name."""

    tools: dict[str, tuple[Callable[..., Any], float]]
    """Function and timeout in seconds."""

    @classmethod
    def of(cls, tools: Sequence[ToolConfig]) -> Toolbox:
        """Raises ConfigError for a function that cannot be had."""
        return cls({tool.name: (_function(tool), tool.timeout_s) for tool in tools})

    async def answer(self, turn: str) -> str:
        """The answer to the last call in `turn`, errors included. Waits for the tool, at most its timeout."""
        try:
            call = msgspec.json.decode(_CALL.findall(turn)[-1], type=ToolCall)
        except msgspec.MsgspecError as error:
            return f"error: the call is not valid: {error}"
        if call.name not in self.tools:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self.tools)}"
        function, timeout_s = self.tools[call.name]
        try:
            async with asyncio.timeout(timeout_s):
                return str(await _call(function, call.arguments))
        except TimeoutError:
            return f"error: {call.name} took longer than {timeout_s:g} s"
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"


def calls_a_tool(turn: str) -> bool:
    """Whether the policy ends its turn with a call."""
    return bool(_CALL.search(turn))


async def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """A plain function runs in a thread, so that it never holds the event loop."""
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
