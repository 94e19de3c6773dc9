"""A conversation with tools: the policy writes, the tool that it calls answers, the policy goes on.

    prompt -> turn -> <tool_call>? -- yes --> observation -> turn -> ...
                           +-------- no ---> the completion is whole

Tokens of observations get no gradient. A conversation that was interrupted goes on where it was, and no
tool is asked again for what it has answered.
"""

from __future__ import annotations

from async_grpo.config.rollout import MultiTurnConfig
from async_grpo.data.source import Tokenizer
from async_grpo.wire import Sample, Task
from rollout_server.session import Session
from rollout_server.workflows.tools import Toolbox, calls_a_tool


class MultiTurn:
    """The `multi_turn` workflow."""

    def __init__(self, tokenizer: Tokenizer, config: MultiTurnConfig) -> None:
        """Raises ConfigError for a tool that cannot be had."""
        self._tokenizer = tokenizer
        self._config = config
        self._tools = Toolbox.of(config.tools)

    async def run(self, task: Task, session: Session) -> Sample:
        """The conversation, its text being all that was written, answers of tools included."""
        text = ""
        for calls in range(self._config.max_calls + 1):
            turn = await session.turn()
            said = self._tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            text += said
            wants_more = turn.finish_reason == "stop" and calls_a_tool(said)
            if not wants_more or calls == self._config.max_calls or session.tokens_left <= 0:
                break
            text += await self._observe(session, said)
            if session.tokens_left <= 0:
                break
        return session.sample(text)

    async def _observe(self, session: Session, said: str) -> str:
        async def answer() -> list[int]:
            result = (await self._tools.answer(said))[: self._config.max_result_chars]
            return self._tokenizer.encode(self._config.observation.replace("{result}", result))

        return self._tokenizer.decode((await session.observe(answer)).tolist(), skip_special_tokens=True)
