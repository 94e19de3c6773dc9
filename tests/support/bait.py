"""Completions that are hard on verifiers: long, deep, broken, and baits for regular expressions and algebra.

`baits(count, seed)` is an endless mixture, the same for the same seed; none is above 100 kB.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

LONGEST = 100_000

REPEATED = [
    *("{", "}", "\\boxed{", "boxed{", "\\", "\\\\", "$", "$1$ ", "(", "[", "####", "#### 1 ", "=", ",", ".", "-", "1/"),
    *(
        "<think>",
        "</think>",
        "</think><answer>",
        "</think> ",
        "<answer>",
        "</answer>",
        "</answer>x",
        "<answer></answer>",
    ),
    *("1", "9", "0", "1 ", "1,111", ",111", "1.1", "1,2,", "١", "٣,", "²", "½", "Ⅻ", "十", "𝟗", "−", "\0", " ", "\n"),
    *(
        "\t",
        "\u202e",
        "\ufeff",
        "\u0301",
        "👩‍👩‍👧",
        "Answer:",
        "answer : ",
        "Step 1",
        "Step 1:",
        "First,",
        "\n-",
        "\\text{",
    ),
    *("\\frac{1}{", "\\sqrt{", "\\left(", "^{2", "_{1", "\\text{and}", "\\dfrac12", "%", "e", "E9", "0x", "inf", "nan"),
]
BOMBS = [
    *("9^{9^{9^{9}}}", "2^{999999999999}", "100000!!!", "\\binom{10^9}{10^8}", "\\sum_{i=1}^{10^7} i^i"),
    *(
        "\\int_0^1 e^{x^2} \\sin(x^5) dx",
        "\\prod_{k=1}^{10^6} k",
        "10^{-10^{9}}",
        "(x+1)^{5000}",
        "\\lim_{x\\to 0} x^x",
    ),
    *(
        "\\frac{1}{" * 200 + "1" + "}" * 200,
        "\\sqrt{" * 300 + "2" + "}" * 300,
        "x" * 2000,
        "\\{" + "1," * 3000 + "1\\}",
    ),
]


def baits(count: int, seed: int, *, longest: int = LONGEST) -> Iterator[str]:
    """`count` completions of at most `longest` characters."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.choices(KINDS, WEIGHTS)[0](rng, int(10 ** rng.uniform(1, 5)))[:longest]


def _repeated(rng: random.Random, length: int) -> str:
    piece = rng.choice(REPEATED)
    return piece * (length // len(piece))


def _almost(rng: random.Random, length: int) -> str:
    """What looks right at both ends."""
    ends = [("<think>", "</answer>"), ("\\boxed{", "}"), ("boxed{", ".}"), ("#### ", " 18"), ("", "\\boxed{18}")]
    left, right = rng.choice(ends)
    return left + _repeated(rng, length) + right


def _mixed(rng: random.Random, length: int) -> str:
    pieces = rng.choices(REPEATED, k=rng.randint(2, 8))
    return "".join(rng.choices(pieces, k=length // 4))


def _nested(rng: random.Random, length: int) -> str:
    """Deep, and its two sides of different depth."""
    opened, closed = rng.choice(
        [("{", "}"), ("\\boxed{", "}"), ("(", ")"), ("\\frac{1}{", "}"), ("<answer>", "</answer>")]
    )
    depth = length // (len(opened) + len(closed))
    return opened * depth + "18" + closed * rng.choice([0, depth - 1, depth, depth + 1])


def _number(rng: random.Random, length: int) -> str:
    digits = "".join(rng.choices("0123456789", k=length))
    return (
        rng.choice(["\\boxed{%s}", "%s", "#### %s.5", "Answer: %s", "-%s/7", "boxed{%s.}", "<answer>%s</answer>"])
        % digits
    )


def _garbage(rng: random.Random, length: int) -> str:
    """Any characters but halves of one, which no decoder writes."""
    points = (
        rng.choice([rng.randint(0, 127), rng.randint(0, 0xD7FF), rng.randint(0xE000, 0x10FFFF)]) for _ in range(length)
    )
    return "".join(map(chr, points))


def _bomb(rng: random.Random, length: int) -> str:
    return rng.choice(["\\boxed{%s}", "$%s$", "<think>.</think><answer>\\boxed{%s}</answer>"]) % rng.choice(BOMBS)


Kind = Callable[[random.Random, int], str]
KINDS: list[Kind] = [_repeated, _almost, _mixed, _nested, _number, _garbage, _bomb]
WEIGHTS = [20, 25, 20, 15, 10, 6, 4]
