"""Search for `\\boxed{..}`, and format rules. Nothing here uses the reference answer.

Every function reads the text once, however unbalanced its braces and tags are. As regular expressions, some of these
rules would take time quadratic in the length of a completion (a lazy `.*?` is retried from every tag), so they search
for the tags in order instead.
"""

from __future__ import annotations

import re
from itertools import islice

_BOX_OR_BRACE = re.compile(r"\\boxed\s*+\{|[{}]")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STEP = re.compile(r"Step \d++:|^\d++\.|\n[-*]|(?:First|Second|Next|Finally),")
_FULL_SCORE_STEPS = 3


def find_last_closed_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{..}` with balanced braces; None if there is none.

    >>> find_last_closed_box(r"\boxed{1}, no, \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    content = None
    content_start = -1
    open_braces: list[int] = []  # start of the content of each open box; -1 for an ordinary brace
    for match in _BOX_OR_BRACE.finditer(text):
        if match[0] != "}":
            is_box = len(match[0]) > 1
            open_braces.append(match.end() if is_box else -1)
        elif open_braces:
            # Boxes close inside out, so compare starts: of \boxed{\boxed{1}} the inner one is the last.
            start = open_braces.pop()
            if start > content_start:
                content = text[start : match.start()]
                content_start = start
    return content


def find_last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{`; None if there is none or if it never closes.

    >>> [find_last_box(text) for text in (r"\boxed{1} \boxed{\frac{1}{2}}", r"\boxed{1} \boxed{2")]
    ['\\frac{1}{2}', None]
    """
    _, box, rest = text.rpartition("\\boxed{")
    return _read_group(rest) if box else None


def find_text_after_boxed(text: str) -> str:
    r"""Return the text after the last "boxed": the content of its braces (the rest of the text if they never close), or
    without braces the text before the next `$`; "" if there is no "boxed".

    >>> [find_text_after_boxed(text) for text in (r"\boxed{1{2}3}4", r"$\boxed 12$", "boxed{1", "none")]
    ['1{2}3', '12', '1', '']
    """
    _, word, rest = text.rpartition("boxed")
    if not word:
        return ""
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip()
    content = _read_group(rest[1:])
    return rest[1:] if content is None else content


def find_one_line_boxes(text: str, limit: int) -> list[int]:
    r"""Return the positions of the first `limit` boxes `\boxed{..}` whose first `}` is on the line of their start.

    >>> find_one_line_boxes("\\boxed{1} \\boxed{\n} \\boxed{2}", limit=5)
    [0, 20]
    """
    positions: list[int] = []
    start = text.find("\\boxed{")
    # The next "}" and "\n" at or after `content`. They are searched again only once they are behind it, so that a text
    # of many unclosed boxes is read once.
    close = -1
    newline = -1
    while start >= 0 and len(positions) < limit:
        content = start + len("\\boxed{")
        if close < content:
            close = text.find("}", content)
            if close < 0:
                break
        if newline < content:
            newline = _find_or_end(text, "\n", content)
        if close < newline:
            positions.append(start)
            content = close + 1
        start = text.find("\\boxed{", content)
    return positions


def strict_format(completion: str, answer: str) -> float:
    r"""Return 1 if the completion has the strict format, else -0.5.

    The four tags and one `\boxed{..}` (closed on its line) each occur exactly once, in order, with the box inside the
    answer, and there is no text before `<think>` or after `</answer>`.

    >>> strict_format(r"<think>a</think><answer>\boxed{1}</answer>", "")
    1.0
    """
    boxes = find_one_line_boxes(completion, limit=2)
    if len(boxes) != 1 or any(completion.count(tag) != 1 for tag in _TAGS):
        return -0.5
    think_start, think_end, answer_start, answer_end = (completion.find(tag) for tag in _TAGS)
    is_ordered = think_start < think_end < answer_start < boxes[0] < answer_end
    is_strict = is_ordered and think_start == 0 and completion.endswith("</answer>")
    return 1.0 if is_strict else -0.5


def step(completion: str, answer: str) -> float:
    r"""Return min(1, markers / 3) for the number of step markers.

    A marker is `Step 1:`, a number with a period at the start of the text, a line (but the first) that starts with `-`
    or `*`, or one of `First,` `Second,` `Next,` `Finally,`.

    >>> round(step("First, add. Next, divide.", ""), 3)
    0.667
    """
    markers = islice(_STEP.finditer(completion), _FULL_SCORE_STEPS)
    return len(list(markers)) / _FULL_SCORE_STEPS


def has_boxed_answer_format(completion: str) -> bool:
    r"""True if all of it matches `<think>.*</think>.*<answer>.*\\boxed\{.*\}.*</answer>` (DOTALL)."""
    end = 0
    for part in ("<think>", "</think>", "<answer>", "\\boxed{", "}"):
        position = completion.find(part, end)
        if position < 0 or (part == "<think>" and position > 0):
            return False
        end = position + len(part)
    return completion.endswith("</answer>") and len(completion) - len("</answer>") >= end


def _read_group(text: str) -> str | None:
    """Return the text before the brace that closes a group opened just before it; None if it never closes."""
    depth = 1
    for match in re.finditer(r"[{}]", text):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[: match.start()]
    return None


def _find_or_end(text: str, part: str, start: int) -> int:
    position = text.find(part, start)
    return len(text) if position < 0 else position
