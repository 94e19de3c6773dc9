"""Verifier of knights-and-knaves puzzles (Logic-RL, arXiv 2502.14768; the scores are those of MindRLHF)."""

from __future__ import annotations

import re

_HEADERS = ("Assistant:", "<|im_start|>assistant")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_WORD = re.compile(r"\b[A-Za-z]+\b")
_ROLES = ("knight", "knave")

_FORM, _NO_FORM = 1.0, -1.0
_RIGHT, _WRONG, _NO_ANSWER = 2.0, -1.5, -2.0


def kk_reward(completion: str, answer: str, *, prompt: str = "") -> float:
    """3 for a right answer, -0.5 for a wrong one, -1 without an answer; -3 without the form.

    That is 1 for the form, else -1, plus 2 for a right answer, -1.5 for a wrong one, -2 for none.

    The text is what follows the first `Assistant:` (or else `<|im_start|>assistant`) of prompt and completion; without
    either there is no answer. Form: each of the four tags once, in order. The answer names every person of the
    reference in `NAME is a knight` or `NAME is a knave`, and no further role. Raises ValueError for a reference
    that names nobody.

    >>> texts = ("Zoe is a knight", "Zoe is a knave", "Zoe: knight")
    >>> [kk_reward(f"Assistant: <think></think><answer>{text}</answer>", "Zoe is a knight") for text in texts]
    [3.0, -0.5, -1.0]
    """
    expected = _roles(answer)
    if not expected:
        raise ValueError(f"the reference answer {answer[:80]!r} names no knight and no knave")
    text = prompt + completion
    header = next((header for header in _HEADERS if header in text), "")
    text = text.partition(header)[2] if header else text
    if not _has_form(text):
        return _NO_FORM + _NO_ANSWER
    given = text[text.find("<answer>") + len("<answer>") : text.find("</answer>")] if header else ""
    found = _named(given, list(expected))
    return _FORM + (_NO_ANSWER if found is None else _RIGHT if found == expected else _WRONG)


def _roles(answer: str) -> dict[str, str]:
    """Role by name. The first word of a line is the name, the first role behind it the role."""
    roles: dict[str, str] = {}
    for line in answer.split("\n"):
        name, *words = _WORD.findall(line) or [""]
        if role := next((word.lower() for word in words if word.lower() in _ROLES), None):
            roles[name] = role
    return roles


def _has_form(text: str) -> bool:
    positions = [text.find(tag) for tag in _TAGS]
    return all(text.count(tag) == 1 for tag in _TAGS) and positions == sorted(positions)


def _named(given: str, names: list[str]) -> dict[str, str] | None:
    """The roles that the answer gives to the names; None if it leaves one out, or has more or fewer roles."""
    if sum(given.lower().count(role) for role in _ROLES) != len(names):
        return None
    roles = {}
    for name in names:
        said = re.search(rf"\b{re.escape(name)}\s+is\s+a\s+(knight|knave)\b", given, re.IGNORECASE)
        if said is None:
            return None
        roles[name] = said[1].lower()
    return roles
