r"""Equality of short answers by the rules of OpenAI's PRM800K grader, and the verifiers of MindSpeed-RL that use it.

The rules are those of the package mathruler (0.1.0).

Two answers are equal if one of these holds: the same normal form of Hendrycks' MATH; the same normal form of PRM800K;
the latter are tuples, or single expressions, whose elements are equal in pairs. Elements are equal if sympy
simplifies their difference to 0, but two fractions only as texts (reduced is part of the answer), and a whole number
never equals an expression that must be worked out.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from async_grpo.errors import DependencyError
from async_grpo.rewards.verifiers import extracts
from async_grpo.rewards.verifiers.boxed import in_last_box, is_whole
from async_grpo.rewards.verifiers.latex import plain_text

try:
    import sympy
    from sympy.parsing import sympy_parser
except ImportError as error:
    raise DependencyError(
        f"the rewards acc_for_ppo, base_acc and math_17k_acc need a package ({error}). Type: pip install sympy"
    ) from error

_TEXT_ONLY = re.compile(r"\\text\{(.+?)\}\n?\Z")
_SAME_IN_MATH = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
_UNIT = "\\text{ "
_INTEGER = r"(?:0|-?[1-9][0-9]*)"
_SLASH = re.compile(rf"({_INTEGER})/({_INTEGER})")

_SAME_IN_PRM800K = (
    ("\\%", ""),
    ("\\$", ""),
    ("$", ""),
    ("%", ""),
    (" or ", " , "),
    (" and ", " , "),
    ("million", "*10^6"),
    ("billion", "*10^9"),
    ("trillion", "*10^12"),
)
_UNIT_NAMES = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
_UNITS = [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _UNIT_NAMES]
_AS_SYMPY_WRITES = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))
_MIXED = re.compile("([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d),(\d{3})(?!\d)")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?\n?\Z")
_NEAR = 1e-7
_EXACT_FLOATS = 2.0**53
"""Beyond it a float is no longer the whole number that was written."""

_MOST_LETTERS = 2
_SYMPY_NAMES = "Integer Float Number Symbol Function sqrt ln re im factorial pi oo zoo"
"""What may be called or named in an expression."""
_TOO_LARGE = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")
_TRANSFORMATIONS = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)


def boxed(completion: str) -> str | None:
    """What `math_17k_acc` compares, in the normal form of PRM800K; None without a box."""
    given = in_last_box(completion)
    return None if given is None else normal_form(given.strip())


@extracts(boxed)
def math_17k_acc(completion: str, answer: str) -> float:
    r"""1 if the content of the last `\boxed{..}` equals the reference (after `####`, where it has that), else 0; 0
    also if that box never closes.

    >>> [math_17k_acc(text, "18") for text in (r"17, no, \boxed{18.0}", "18", r"\boxed{18}, \boxed{18")]
    [1.0, 0.0, 0.0]
    """
    given = in_last_box(completion)
    return float(given is not None and equal(given.strip(), answer.rpartition("####")[2].strip()))


def boxed_in_whole(completion: str) -> str | None:
    """What `base_acc` compares: None for a completion without its form."""
    return boxed(completion) if is_whole(completion) else None


@extracts(boxed_in_whole)
def base_acc(completion: str, answer: str) -> float:
    r"""`math_17k_acc` for a completion that is `<think>..</think>..<answer>..\boxed{..}..</answer>`, else 0."""
    return math_17k_acc(completion, answer) if is_whole(completion) else 0.0


def equal(given: str, answer: str) -> bool:
    r"""Whether an answer equals the reference.

    >>> [equal(given, r"\frac{1}{2}") for given in ("1/2", "0.5", r"\frac{2}{4}", "(1)/(2)")]
    [True, True, False, True]
    """
    if math_form(given) == math_form(answer):
        return True
    one, other = normal_form(given), normal_form(answer)
    if one == other:
        return True
    pair, others = _elements(one), _elements(other)
    same_ends = len(others) <= 1 or (one[:1], one[-1:]) == (other[:1], other[-1:])
    return bool(one) and same_ends and len(pair) == len(others) and all(map(_same_element, pair, others))


def math_form(answer: str) -> str:
    r"""An answer in the normal form of Hendrycks' MATH; as it was, without whitespace around it, if it is malformed.

    >>> [math_form(text) for text in (r"x = \frac12", ".5", r"1/2", r"\text{18}", r"5\text{ cm}", r"\sqrt3")]
    ['\\frac{1}{2}', '\\frac{1}{2}', '\\frac{1}{2}', '18', '5', '\\sqrt{3}']
    """
    inside = _TEXT_ONLY.match(answer := answer.strip())
    plain = inside[1].strip() if inside else answer
    try:
        return _math_form(plain)
    except _Malformed:
        return plain


def normal_form(answer: str) -> str:
    r"""An answer in the normal form of PRM800K.

    >>> [normal_form(text) for text in (r"\$1,800.00", r"7\frac{3}{4}", "5 cm^2", r"\frac{\pi}{2}", "2 million")]
    ['1800', '7+3/4', '5', 'pi/2', '2*10^6']
    """
    inside = _TEXT_ONLY.match(answer)
    text = inside[1] if inside else answer
    for before, after in _SAME_IN_PRM800K:
        text = text.replace(before, after)
    for unit in _UNITS:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (number := _whole_number(text)) is not None:
        text = str(number)
    text = _plain(text) if "\\" in text else text
    text = _MIXED.sub(r"\1+\2", re.sub("- *", "-", text)).replace(" ", "")
    text = text.replace("{", "").replace("}", "").lower()
    number = _whole_number(_without_thousands(text))
    return text if number is None else str(number)


class _Malformed(Exception):
    """An answer that has no normal form of MATH."""


def _math_form(text: str) -> str:
    for before, after in _SAME_IN_MATH:
        text = text.replace(before, after)
    text, unit, rest = text.partition(_UNIT)
    if unit and _UNIT in rest:
        raise _Malformed
    text = text.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = _fractions_in_braces(_roots_in_braces(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    slash = _SLASH.fullmatch(text)
    return f"\\frac{{{slash[1]}}}{{{slash[2]}}}" if slash else text


def _roots_in_braces(text: str) -> str:
    r"""`\sqrt3` as `\sqrt{3}`."""
    head, *tails = text.split("\\sqrt")
    if not all(tails):
        raise _Malformed
    return "\\sqrt".join([head, *(tail if tail[0] == "{" else f"{{{tail[0]}}}{tail[1:]}" for tail in tails)])


def _fractions_in_braces(text: str) -> str:
    r"""`\frac12` as `\frac{1}{2}`, `\frac1{72}` as `\frac{1}{72}`."""
    head, *tails = text.split("\\frac")
    braced = [head]
    for tail in tails:
        if not tail:
            raise _Malformed
        if tail[0] == "{":
            braced.append(tail)
        elif len(tail) == 1:
            return text
        else:
            under = tail[1:] if tail[1] == "{" else f"{{{tail[1]}}}{tail[2:]}"
            braced.append(f"{{{tail[0]}}}{under}")
    return "\\frac".join(braced)


def _plain(text: str) -> str:
    """LaTeX as text that sympy reads; a fraction behind a number becomes a mixed number."""
    try:
        plain = plain_text(text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac"))
    except (RecursionError, ValueError):
        return text
    for before, after in _AS_SYMPY_WRITES:
        plain = plain.replace(before, after)
    return plain.strip()


def _elements(text: str) -> list[str]:
    """The elements of a tuple or an interval, else the text itself. Commas between thousands separate nothing."""
    text = _without_thousands(text)
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not any(mark in text[1:-1] for mark in "()[]"):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text] if text else []


def _same_element(given: str, answer: str) -> bool:
    if _FRACTION.match(given) and _FRACTION.match(answer):
        return given == answer
    return _is_whole_number(given) == _is_whole_number(answer) and _difference_is_0(answer, given)


def _difference_is_0(answer: str, given: str) -> bool:
    """Whether sympy simplifies the difference to 0. False for no expression, more than two letters, or large powers."""
    expression = f"({answer})-({given})"
    letters = {letter for letter in expression.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    if len(letters) > _MOST_LETTERS or _TOO_LARGE.search(expression):
        return False
    try:
        return bool(sympy.simplify(parse(expression.replace("^", "**"))) == 0)
    except Exception:  # sympy raises many kinds of its own for what it cannot work out
        return False


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_NAMES = {name: getattr(sympy, name) for name in _SYMPY_NAMES.split()}


def parse(expression: str) -> Any:
    """The expression as sympy's parser reads it, with implicit multiplication.

    The parser writes Python code. It is not run, because a policy has written the text, but evaluated here, with
    arithmetic and a few names.

    Raises ValueError, SyntaxError or another error of sympy for what is not an expression.

    >>> str(parse("2x(x+1)/sqrt(4)"))
    'x*(x + 1)'
    """
    names: dict[Any, Any] = {}
    code = sympy_parser.stringify_expr(expression, names, vars(sympy), _TRANSFORMATIONS)
    return _evaluated(ast.parse(code.strip(), mode="eval").body)


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_evaluated(left), _evaluated(right))
        case ast.UnaryOp(kind, operand) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_evaluated(operand))
        case ast.Call(function, arguments, []):
            return _evaluated(function)(*map(_evaluated, arguments))
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.Constant(value) if isinstance(value, int | str):
            return value
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not arithmetic")


def _whole_number(text: str) -> int | None:
    """The whole number that a text is, or nearly is (within _NEAR); None for any other text.

    Large numbers are read exactly: a float would make equal whole numbers of 12345678901234567891 and ...890.
    """
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if abs(number) >= _EXACT_FLOATS:
        exact = Decimal(text)
        return int(exact) if exact == int(exact) else None
    return round(number) if abs(number - round(number)) <= _NEAR else None


def _is_whole_number(text: str) -> bool:
    return _whole_number(_without_thousands(text)) is not None


def _without_thousands(text: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\2", text)) != text:
        text = shorter
    return text
