"""Loads reward functions by name.

A reward function is a function, an object with `__call__`, or a class of such objects (instantiated once per verifier
process, without arguments); it may be `async`. It takes the completion and the reference answer by position, and the
keywords `prompt`, `metadata` and `tool_calls` if it has parameters with these names:

    def score(completion: str, answer: str, *, prompt: str, metadata: Mapping[str, str]) -> float | None
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.plugins import load_plugin
from async_grpo.rewards.base import RewardInput

Judge = Callable[[RewardInput], Any]
"""RewardInput -> score, or an awaitable of the score."""
Extract = Callable[[str], Any]
"""Completion -> its answer as text, or None."""

BUILTIN = {
    "answer_tag": "async_grpo.rewards.verifiers.answers:answer_tag",
    "format": "async_grpo.rewards.verifiers.answers:format_tags",
    "gsm8k": "async_grpo.rewards.verifiers.answers:gsm8k",
    "math_verify": "async_grpo.rewards.verifiers.symbolic:math_verify",
    "format_reward": "async_grpo.rewards.verifiers.answers:format_tags",
    "accuracy_reward": "async_grpo.rewards.verifiers.text:accuracy_reward",
    "qwen_accuracy_reward": "async_grpo.rewards.verifiers.text:qwen_accuracy_reward",
    "acc": "async_grpo.rewards.verifiers.symbolic:acc",
    "acc_for_ppo": "async_grpo.rewards.verifiers.prm800k:math_17k_acc",
    "base_acc": "async_grpo.rewards.verifiers.prm800k:base_acc",
    "math_17k_acc": "async_grpo.rewards.verifiers.prm800k:math_17k_acc",
    "math_verify_reward": "async_grpo.rewards.verifiers.symbolic:math_verify_reward",
    "acc_for_dapo": "async_grpo.rewards.verifiers.text:acc_for_dapo",
    "retool_reward": "async_grpo.rewards.verifiers.text:retool_reward",
    "kk_reward": "async_grpo.rewards.verifiers.logic:kk_reward",
    "strict_format": "async_grpo.rewards.verifiers.boxed:strict_format",
    "step": "async_grpo.rewards.verifiers.boxed:step",
}
"""Built-in verifiers by name; described in docs/verifiers.md."""

ALGEBRA_VERIFIERS = frozenset(name for name, path in BUILTIN.items() if "symbolic" in path or "prm800k" in path)
"""Built-in verifiers that import computer algebra, which may not be installed."""

SIGNATURE = "(completion: str, answer: str) -> float, with the optional keywords prompt, metadata and tool_calls"
_KEYWORDS = ("prompt", "metadata", "tool_calls")


def load_verifier(name: str) -> tuple[Judge, Extract | None]:
    """Load a built-in verifier, or `module:attribute` from the Python path or the working folder.

    Returns the verifier and its attribute `extract`, the function that extracts an answer; None if it has none. Raises
    ConfigError.
    """
    loaded = _load(name)
    if not callable(loaded):
        raise ConfigError(
            f"rewards.functions: {name!r} is a value of type {type(loaded).__name__}, not a function {SIGNATURE}. "
            "Name a callable"
        )
    function: Callable[..., Any] = loaded
    keywords = _accepted_keywords(name, function)
    extract: Extract | None = getattr(function, "extract", None)
    if extract is not None and not callable(extract):
        raise ConfigError(
            f"rewards.functions: {name!r} has an attribute `extract` that is a {type(extract).__name__}. Make it a "
            "function (completion: str) -> str | None, or give it another name"
        )

    def judge(item: RewardInput) -> Any:
        return function(item.completion, item.answer, **{keyword: getattr(item, keyword) for keyword in keywords})

    return judge, extract


def check_name(name: str) -> None:
    """Raise ConfigError unless the name is a built-in verifier or `module:attribute`. Imports nothing."""
    module_name, _, attribute = name.partition(":")
    if name not in BUILTIN and not (module_name and attribute):
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"rewards.functions: there is no verifier {name!r}. {meant}"
            f"Use one of {', '.join(BUILTIN)}, or module:attribute for your own"
        )


def _load(name: str) -> object:
    check_name(name)
    loaded: object = load_plugin(BUILTIN.get(name, name), key="rewards.functions", expected=f"a function {SIGNATURE}")
    if not inspect.isclass(loaded):
        return loaded
    try:
        return loaded()
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"rewards.functions: {name!r} cannot be instantiated ({type(error).__name__}: {error}). "
            "A class must be callable without arguments"
        ) from error


def _accepted_keywords(name: str, function: Callable[..., Any]) -> list[str]:
    """The optional keywords that the function accepts. Raises ConfigError if it cannot be called with them."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C modules have no signature
        return []
    keywords = [keyword for keyword in _KEYWORDS if _accepts(signature, keyword)]
    try:
        signature.bind("", "", **dict.fromkeys(keywords))
    except TypeError as error:
        raise ConfigError(
            f"rewards.functions: {name!r} has the signature {signature} and cannot be called with a completion and "
            f"an answer ({error}). Give it {SIGNATURE}"
        ) from error
    return keywords


def _accepts(signature: inspect.Signature, keyword: str) -> bool:
    parameters = signature.parameters
    if keyword in parameters:
        return parameters[keyword].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
