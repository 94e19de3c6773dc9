"""Verifier of knights-and-knaves puzzles (Logic-RL, arXiv 2502.14768; the scores are those of MindRLHF)."""

from __future__ import annotations

import re

_HEADERS = ("Assistant:", "<|im_start|>assistant")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_WORD = re.compile(r"\b[A-Za-z]+\b")
_ROLES = ("knight", "knave")

_FORMAT = 1.0
_NO_FORMAT = -1.0
_RIGHT = 2.0
_WRONG = -1.5
_NO_ANSWER = -2.0


def kk_reward(completion: str, answer: str, *, prompt: str = "") -> float:
    """Return 3 for a right answer, -0.5 for a wrong one, -1 for none, and -3 without the format.

    The score is the sum of two parts: 1 for the format, else -1; and 2 for a right answer, -1.5 for a wrong one, -2 for
    none.

    Only the text after the first `Assistant:` (or else `<|im_start|>assistant`) of prompt and completion is read;
    without either there is no answer. Format: each of the four tags once, in order. The answer must contain `NAME is a
    knight` or `NAME is a knave` for every person of the reference, and no other role.

    Raises ValueError for a reference without a role.

    >>> texts = ("Zoe is a knight", "Zoe is a knave", "Zoe: knight")
    >>> [kk_reward(f"Assistant: <think></think><answer>{text}</answer>", "Zoe is a knight") for text in texts]
    [3.0, -0.5, -1.0]
    """
    expected = _parse_reference_roles(answer)
    if not expected:
        raise ValueError(f"the reference answer {answer[:80]!r} names no knight and no knave")

    text = prompt + completion
    header = next((header for header in _HEADERS if header in text), None)
    if header is not None:
        text = text.partition(header)[2]
    if not _has_format(text):
        return _NO_FORMAT + _NO_ANSWER
    if header is None:
        return _FORMAT + _NO_ANSWER

    answer_text = text[text.find("<answer>") + len("<answer>") : text.find("</answer>")]
    roles = _find_roles(answer_text, list(expected))
    if roles is None:
        return _FORMAT + _NO_ANSWER
    return _FORMAT + (_RIGHT if roles == expected else _WRONG)


def _parse_reference_roles(answer: str) -> dict[str, str]:
    """Return the role of each person. The first word of a line is the name, the first role after it the role."""
    roles: dict[str, str] = {}
    for line in answer.split("\n"):
        words = _WORD.findall(line)
        for word in words[1:]:
            if word.lower() in _ROLES:
                roles[words[0]] = word.lower()
                break
    return roles


def _has_format(text: str) -> bool:
    positions = [text.find(tag) for tag in _TAGS]
    return all(text.count(tag) == 1 for tag in _TAGS) and positions == sorted(positions)


def _find_roles(answer: str, names: list[str]) -> dict[str, str] | None:
    """Return the role of each name; None if a name has none, or if the answer mentions more or fewer roles."""
    if sum(answer.lower().count(role) for role in _ROLES) != len(names):
        return None
    roles = {}
    for name in names:
        match = re.search(rf"\b{re.escape(name)}\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE)
        if match is None:
            return None
        roles[name] = match[1].lower()
    return roles
