r"""Comparison of short answers by the rules of OpenAI's PRM800K grader, and the verifiers of MindSpeed-RL that use it.

The rules are those of the package mathruler (0.1.0). Two answers are equal if one of these holds:

1. They have the same normal form of Hendrycks' MATH (`normalize_math`).
2. They have the same normal form of PRM800K (`normalize_prm800k`).
3. The latter are tuples (or single expressions) with pairwise equal elements. Elements are equal if sympy simplifies
   their difference to 0. Two fractions are equal only as text, because reducing them is part of the answer. An integer
   never equals an expression that still has to be evaluated.
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
from async_grpo.rewards.verifiers.boxed import find_last_box, has_boxed_answer_format
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
    "degree",
    "cm",
    "centimeter",
    "meter",
    "mile",
    "second",
    "minute",
    "hour",
    "day",
    "week",
    "month",
    "year",
    "foot",
    "feet",
    "inch",
    "yard",
)
_UNITS = [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _UNIT_NAMES]
_SYMPY_SPELLINGS = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))
_MIXED = re.compile("([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d),(\d{3})(?!\d)")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?\n?\Z")
_INTEGER_TOLERANCE = 1e-7
_MAX_EXACT_FLOAT = 2.0**53
"""Floats represent every integer up to this exactly."""

_MAX_LETTERS = 2
_SYMPY_NAMES = "Integer Float Number Symbol Function sqrt ln re im factorial pi oo zoo"
"""Names that an expression may use."""
_TOO_LARGE = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")
_TRANSFORMATIONS = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)


def extract_boxed(completion: str) -> str | None:
    """Return the text that `math_17k_acc` compares, in the normal form of PRM800K; None without a box."""
    content = find_last_box(completion)
    return None if content is None else normalize_prm800k(content.strip())


@extracts(extract_boxed)
def math_17k_acc(completion: str, answer: str) -> float:
    r"""Return 1 if the content of the last `\boxed{..}` equals the reference (after `####`, if any), else 0. It is also
    0 if that box never closes.

    >>> [math_17k_acc(text, "18") for text in (r"17, no, \boxed{18.0}", "18", r"\boxed{18}, \boxed{18")]
    [1.0, 0.0, 0.0]
    """
    content = find_last_box(completion)
    if content is None:
        return 0.0
    reference = answer.rpartition("####")[2]
    return float(are_equal_answers(content.strip(), reference.strip()))


def extract_formatted_box(completion: str) -> str | None:
    """Return the text that `base_acc` compares; None for a completion without its format."""
    return extract_boxed(completion) if has_boxed_answer_format(completion) else None


@extracts(extract_formatted_box)
def base_acc(completion: str, answer: str) -> float:
    r"""Return `math_17k_acc` for a completion of the form `<think>..</think>..<answer>..\boxed{..}..</answer>`, else
    0."""
    if not has_boxed_answer_format(completion):
        return 0.0
    return math_17k_acc(completion, answer)


def are_equal_answers(text: str, reference: str) -> bool:
    r"""True if `text` equals the reference by the rules in this module's header.

    >>> [are_equal_answers(text, r"\frac{1}{2}") for text in ("1/2", "0.5", r"\frac{2}{4}", "(1)/(2)")]
    [True, True, False, True]
    """
    if normalize_math(text) == normalize_math(reference):
        return True
    text = normalize_prm800k(text)
    reference = normalize_prm800k(reference)
    if text == reference:
        return True

    elements = _split_tuple(text)
    reference_elements = _split_tuple(reference)
    if not text or len(elements) != len(reference_elements):
        return False
    # The brackets of a tuple count: (0, 1) and [0, 1] are different intervals.
    have_same_brackets = (text[:1], text[-1:]) == (reference[:1], reference[-1:])
    if len(reference_elements) > 1 and not have_same_brackets:
        return False
    return all(map(_are_equal_elements, elements, reference_elements))


def normalize_math(answer: str) -> str:
    r"""Return an answer in the normal form of Hendrycks' MATH, or only stripped of whitespace if it is malformed.

    >>> [normalize_math(text) for text in (r"x = \frac12", ".5", r"1/2", r"\text{18}", r"5\text{ cm}", r"\sqrt3")]
    ['\\frac{1}{2}', '\\frac{1}{2}', '\\frac{1}{2}', '18', '5', '\\sqrt{3}']
    """
    stripped = answer.strip()
    text_macro = _TEXT_ONLY.match(stripped)
    if text_macro:
        stripped = text_macro[1].strip()
    try:
        return _normalize_well_formed_math(stripped)
    except _Malformed:
        return stripped


def normalize_prm800k(answer: str) -> str:
    r"""Return an answer in the normal form of PRM800K.

    >>> [normalize_prm800k(text) for text in (r"\$1,800.00", r"7\frac{3}{4}", "5 cm^2", r"\frac{\pi}{2}", "2 million")]
    ['1800', '7+3/4', '5', 'pi/2', '2*10^6']
    """
    text_macro = _TEXT_ONLY.match(answer)
    text = text_macro[1] if text_macro else answer
    for before, after in _SAME_IN_PRM800K:
        text = text.replace(before, after)
    for unit in _UNITS:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    number = _parse_integer(text)
    if number is not None:
        text = str(number)

    if "\\" in text:
        text = _convert_latex(text)
    text = re.sub("- *", "-", text)
    text = _MIXED.sub(r"\1+\2", text).replace(" ", "")
    text = text.replace("{", "").replace("}", "").lower()
    number = _parse_integer(_remove_thousands_commas(text))
    return text if number is None else str(number)


class _Malformed(Exception):
    """An answer that has no normal form of MATH."""


def _normalize_well_formed_math(text: str) -> str:
    for before, after in _SAME_IN_MATH:
        text = text.replace(before, after)
    text, unit, rest = text.partition(_UNIT)
    if unit and _UNIT in rest:
        raise _Malformed
    text = text.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text

    # `x = 5` is 5. A longer left side may be part of the answer.
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value

    text = _add_root_braces(text).replace(" ", "")
    text = _add_fraction_braces(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    slash = _SLASH.fullmatch(text)
    return f"\\frac{{{slash[1]}}}{{{slash[2]}}}" if slash else text


def _add_root_braces(text: str) -> str:
    r"""Rewrite `\sqrt3` as `\sqrt{3}`."""
    head, *tails = text.split("\\sqrt")
    parts = [head]
    for tail in tails:
        if not tail:
            raise _Malformed
        parts.append(tail if tail[0] == "{" else f"{{{tail[0]}}}{tail[1:]}")
    return "\\sqrt".join(parts)


def _add_fraction_braces(text: str) -> str:
    r"""Rewrite `\frac12` as `\frac{1}{2}` and `\frac1{72}` as `\frac{1}{72}`."""
    head, *tails = text.split("\\frac")
    parts = [head]
    for tail in tails:
        if not tail:
            raise _Malformed
        if tail[0] == "{":
            parts.append(tail)
        elif len(tail) == 1:
            return text
        else:
            denominator = tail[1:] if tail[1] == "{" else f"{{{tail[1]}}}{tail[2:]}"
            parts.append(f"{{{tail[0]}}}{denominator}")
    return "\\frac".join(parts)


def _convert_latex(text: str) -> str:
    """Convert LaTeX to text that sympy parses. A fraction after a number becomes a mixed number."""
    fractions = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    try:
        plain = plain_text(fractions)
    except (RecursionError, ValueError):
        return text
    for before, after in _SYMPY_SPELLINGS:
        plain = plain.replace(before, after)
    return plain.strip()


def _split_tuple(text: str) -> list[str]:
    """Return the elements of a tuple or an interval; for any other text, the text itself."""
    text = _remove_thousands_commas(text)
    is_bracketed = len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]"
    if is_bracketed and not any(bracket in text[1:-1] for bracket in "()[]"):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text] if text else []


def _are_equal_elements(text: str, reference: str) -> bool:
    if _FRACTION.match(text) and _FRACTION.match(reference):
        return text == reference
    return _is_integer(text) == _is_integer(reference) and _is_difference_zero(reference, text)


def _is_difference_zero(reference: str, text: str) -> bool:
    """True if sympy simplifies the difference to 0. False for text that is no expression, and for expressions that are
    not compared because sympy could take forever: more than two letters, or large powers."""
    expression = f"({reference})-({text})"
    letters = {letter for letter in expression.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    if len(letters) > _MAX_LETTERS or _TOO_LARGE.search(expression):
        return False
    try:
        return bool(sympy.simplify(parse_expression(expression.replace("^", "**"))) == 0)
    except Exception:  # sympy raises many kinds of errors for input that it cannot simplify
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


def parse_expression(expression: str) -> Any:
    """Parse an expression by the rules of sympy's parser, with implicit multiplication.

    sympy's parser generates Python code and runs it with `eval`. A policy has written this text, so the code must not
    run: it is interpreted here, restricted to arithmetic and _SYMPY_NAMES.

    Raises ValueError, SyntaxError or an error of sympy if the text is not an expression.

    >>> str(parse_expression("2x(x+1)/sqrt(4)"))
    'x*(x + 1)'
    """
    names: dict[Any, Any] = {}
    code = sympy_parser.stringify_expr(expression, names, vars(sympy), _TRANSFORMATIONS)
    return _evaluate(ast.parse(code.strip(), mode="eval").body)


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(kind, operand) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_evaluate(operand))
        case ast.Call(function, arguments, []):
            return _evaluate(function)(*map(_evaluate, arguments))
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.Constant(value) if isinstance(value, int | str):
            return value
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not arithmetic")


def _parse_integer(text: str) -> int | None:
    """Return the integer that a text represents, within _INTEGER_TOLERANCE; None for any other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if abs(number) >= _MAX_EXACT_FLOAT:
        # As floats, 12345678901234567891 and 12345678901234567890 would be equal.
        exact = Decimal(text)
        return int(exact) if exact == int(exact) else None
    return round(number) if abs(number - round(number)) <= _INTEGER_TOLERANCE else None


def _is_integer(text: str) -> bool:
    return _parse_integer(_remove_thousands_commas(text)) is not None


def _remove_thousands_commas(text: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\2", text)) != text:
        text = shorter
    return text
