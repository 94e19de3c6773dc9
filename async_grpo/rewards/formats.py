"""Rules for the form of a completion; none looks at the reference. Each reads the text once, whatever is in it.

As regular expressions some of these rules take time that grows with the square of a completion's length (a lazy
`.*?` is tried from every tag), so they are written as searches for the tags in order.
"""

from __future__ import annotations

import re
from itertools import islice

from async_grpo.rewards.boxes import closed_boxes

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STEP = re.compile(r"Step \d++:|^\d++\.|\n[-*]|(?:First|Second|Next|Finally),")
_STEPS_WANTED = 3


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
