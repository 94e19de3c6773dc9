"""`\\boxed{..}` in a completion, and rules for the form of a completion. Nothing here looks at the reference.

Everything here reads the text once, however its braces and tags are (un)balanced. As regular expressions, some of
these rules would take time quadratic in the length of a completion (a lazy `.*?` is tried from every tag), so they
search for the tags in order.
"""

from __future__ import annotations

import re
from itertools import islice

_BOX_OR_BRACE = re.compile(r"\\boxed\s*+\{|[{}]")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STEP = re.compile(r"Step \d++:|^\d++\.|\n[-*]|(?:First|Second|Next|Finally),")
_STEPS_WANTED = 3


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{..}` whose braces balance; None if there is none.

    >>> last_boxed(r"\boxed{1}, no, \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    found, best = None, -1
    opened: list[int] = []  # where the content of a box begins; -1 for any other brace
    for match in _BOX_OR_BRACE.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if len(match[0]) > 1 else -1)
        elif opened and (start := opened.pop()) > best:
            found, best = text[start : match.start()], start
    return found


def in_last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{`; None if there is none, or it never closes.

    >>> [in_last_box(text) for text in (r"\boxed{1} \boxed{\frac{1}{2}}", r"\boxed{1} \boxed{2")]
    ['\\frac{1}{2}', None]
    """
    _, box, rest = text.rpartition("\\boxed{")
    return _up_to_closing(rest) if box else None


def behind_last_boxed(text: str) -> str:
    r"""What follows the last "boxed": the content of its braces (all of the rest, if they never close), or without
    braces what stands before the next `$`. "" where there is nothing.

    >>> [behind_last_boxed(text) for text in (r"\boxed{1{2}3}4", r"$\boxed 12$", "boxed{1", "none")]
    ['1{2}3', '12', '1', '']
    """
    _, word, rest = text.rpartition("boxed")
    if not word:
        return ""
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip()
    inside = _up_to_closing(rest[1:])
    return rest[1:] if inside is None else inside


def closed_boxes(text: str, most: int) -> list[int]:
    r"""Where the first `most` of `\boxed{..}` begin that end, at the first `}`, on the line they begin on.

    >>> closed_boxes("\\boxed{1} \\boxed{\n} \\boxed{2}", most=5)
    [0, 20]
    """
    found: list[int] = []
    start, close, newline = text.find("\\boxed{"), -1, -1
    while start >= 0 and len(found) < most:
        inside = start + len("\\boxed{")
        if close < inside and (close := text.find("}", inside)) < 0:
            break
        if newline < inside:
            newline = _find_or_end(text, "\n", inside)
        if close < newline:
            found.append(start)
            inside = close + 1
        start = text.find("\\boxed{", inside)
    return found


def strict_format(completion: str, answer: str) -> float:
    r"""1 if each of the four tags and one `\boxed{..}` (closed on its line) stand exactly once and in order, the box
    in the answer, and nothing before `<think>` or behind `</answer>`; else -0.5.

    >>> strict_format(r"<think>a</think><answer>\boxed{1}</answer>", "")
    1.0
    """
    boxes = closed_boxes(completion, most=2)
    if len(boxes) != 1 or any(completion.count(tag) != 1 for tag in _TAGS):
        return -0.5
    think, unthink, begin, end = (completion.find(tag) for tag in _TAGS)
    in_order = think < unthink < begin < boxes[0] < end
    return 1.0 if in_order and think == 0 and completion.endswith("</answer>") else -0.5


def step(completion: str, answer: str) -> float:
    r"""min(1, markers / 3), where a marker is `Step 1:`, a number with a period at the very beginning, a line that
    begins with `-` or `*` (not the first), or `First,` `Second,` `Next,` `Finally,`.

    >>> round(step("First, add. Next, divide.", ""), 3)
    0.667
    """
    return len(list(islice(_STEP.finditer(completion), _STEPS_WANTED))) / _STEPS_WANTED


def is_whole(completion: str) -> bool:
    r"""Whether all of it matches `<think>.*</think>.*<answer>.*\\boxed\{.*\}.*</answer>` (DOTALL)."""
    position = 0
    for part in ("<think>", "</think>", "<answer>", "\\boxed{", "}"):
        found = completion.find(part, position)
        if found < 0 or (part == "<think>" and found > 0):
            return False
        position = found + len(part)
    return completion.endswith("</answer>") and len(completion) - len("</answer>") >= position


def _up_to_closing(text: str) -> str | None:
    """What stands before the brace that closes a group which is open at the beginning; None without that."""
    depth = 1
    for match in re.finditer(r"[{}]", text):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[: match.start()]
    return None


def _find_or_end(text: str, what: str, start: int) -> int:
    position = text.find(what, start)
    return len(text) if position < 0 else position
