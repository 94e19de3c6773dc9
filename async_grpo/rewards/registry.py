"""From the name of a reward function to a callable that takes a RewardInput.

A reward function is a function or an object with `__call__`, or a class of such objects (made once in every
verifier process, without arguments); it may be `async`. It takes the completion and the reference answer by
position, and by keyword `prompt`, `metadata` and `tool_calls`, if it has parameters of these names:

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
"""The score of an item, or an awaitable of it."""
Extract = Callable[[str], Any]
"""The answer that a completion gives, as a text; None if it gives none."""

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
"""Built-in verifiers by name. docs/verifiers.md says what each scores."""

NEED_PACKAGES = frozenset(name for name, where in BUILTIN.items() if "symbolic" in where or "prm800k" in where)
"""Built-in verifiers that do algebra and import packages that may not be installed."""

SIGNATURE = (
    "(completion: str, answer: str) -> float, with the keywords prompt, metadata and tool_calls where it wants them"
)
_KEYWORDS = ("prompt", "metadata", "tool_calls")


def load_verifier(name: str) -> tuple[Judge, Extract | None]:
    """The built-in verifier or the user's `module:attribute` (on the Python path or in the working folder), and its
    attribute `extract`, the function that extracts the answer, if it has one.

    Raises ConfigError with what to change.
    """
    found = _find(name)
    if not callable(found):
        raise ConfigError(
            f"rewards.functions: {name!r} is a value of type {type(found).__name__}, not a function {SIGNATURE}. "
            "Name a callable"
        )
    function: Callable[..., Any] = found
    extras = _extras(name, function)
    extract: Extract | None = getattr(function, "extract", None)
    if extract is not None and not callable(extract):
        raise ConfigError(
            f"rewards.functions: {name!r} has an attribute `extract` that is a {type(extract).__name__}. Make it a "
            "function (completion: str) -> str | None, or give it another name"
        )
    return (
        lambda item: function(item.completion, item.answer, **{extra: getattr(item, extra) for extra in extras}),
        extract,
    )


def check_name(name: str) -> None:
    """Raise ConfigError if the name cannot be that of a reward function. Imports nothing."""
    module_name, _, attribute = name.partition(":")
    if name not in BUILTIN and not (module_name and attribute):
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"rewards.functions: there is no verifier {name!r}. {meant}"
            f"Use one of {', '.join(BUILTIN)}, or module:attribute for your own"
        )


def _find(name: str) -> object:
    check_name(name)
    found: object = load_plugin(BUILTIN.get(name, name), key="rewards.functions", expected=f"a function {SIGNATURE}")
    if not inspect.isclass(found):
        return found
    try:
        return found()
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"rewards.functions: {name!r} cannot be made ({type(error).__name__}: {error}). "
            "A class must be callable without arguments"
        ) from error


def _extras(name: str, function: Callable[..., Any]) -> list[str]:
    """The extra keywords that the function takes. Raises ConfigError if it cannot be called with them."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C modules have no signature
        return []
    extras = [extra for extra in _KEYWORDS if _takes(signature, extra)]
    try:
        signature.bind("", "", **dict.fromkeys(extras))
    except TypeError as error:
        raise ConfigError(
            f"rewards.functions: {name!r} has the signature {signature} and cannot be called with a completion and "
            f"an answer ({error}). Give it {SIGNATURE}"
        ) from error
    return extras


def _takes(signature: inspect.Signature, extra: str) -> bool:
    parameters = signature.parameters
    if extra in parameters:
        return parameters[extra].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
