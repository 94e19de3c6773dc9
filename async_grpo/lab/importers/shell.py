"""Reads launch scripts as text and returns the arguments of the program that they start. Nothing is executed.

Supported: assignments outside of `if`, `case`, loops and functions, `${NAME}`, `${NAME:-default}`, `$((arithmetic))`
and arrays. The user must pass values that a script computes in another way or takes from its environment
(`--set NAME=VALUE`).
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.errors import ConfigError

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=\(")
_REFERENCE = re.compile(r"\$\{(\w+)(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$([A-Za-z_]\w*)")
_ELEMENTS = re.compile(r"\$\{([A-Za-z_]\w*)\[@\]\}")
_OPENERS = ("if", "case", "for", "while", "until", "select")
_CLOSERS = ("fi", "esac", "done")
_ENDS = {"|", "||", "&&", ">", ">>", "<", "&", ";", "2>&1", "&>"}
"""Words that end the arguments of a command."""
UNKNOWN = "\x00"
"""Encloses the name of a variable whose value is not in the script."""
_SUM_START = "\x01"
_SUM_END = "\x02"
"""They enclose the expression of a `$((expression))`."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(slots=True)
class LaunchScript:
    """The variables of a script, filled in from its first line to its last."""

    given: Mapping[str, str]
    """Values of --set. They override the script, as the environment overrides `${NAME:-default}`."""
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    conditional: set[str] = field(default_factory=set)
    """Variables that are set inside an `if`, a `case`, a loop or a function."""
    used: set[str] = field(default_factory=set)
    """Given variables that the script refers to."""

    def find_command(self, text: str, program: re.Pattern[str]) -> tuple[str, list[str]]:
        """Return the program that matches and its arguments, with variables substituted. Raises ConfigError."""
        commands: list[tuple[str, list[str]]] = []
        depth = 0
        for line in _split_statements(_mark_substitutions(text)):
            tokens = _split_words(line) or [""]
            words = [token.rstrip(";") for token in tokens]
            if words[0] in _OPENERS or tokens[-1] == "{":
                depth += 1
            index = next((index for index, token in enumerate(tokens) if program.fullmatch(token)), None)
            if index:  # not at 0: a launcher such as python or accelerate is in front of the program
                commands.append((tokens[index], self._expand_words(tokens[index + 1 :])))
            else:
                self._assign_variables(line, words, is_conditional=depth > 0)
            closed = sum(word in _CLOSERS for word in words)
            if words == ["}"]:
                closed += 1
            depth = max(depth - closed, 0)
        if len(commands) != 1:
            raise ConfigError(
                f"the script starts {len(commands)} programs that match {program.pattern}, and one is needed. Keep one "
                "launch command in the file"
            )
        return commands[0]

    def _assign_variables(self, line: str, words: list[str], *, is_conditional: bool) -> None:
        array = _ARRAY.match(line)
        if array:
            self._assign_array(array, line, is_conditional=is_conditional)
            return
        if words[0] in ("export", "local", "readonly"):
            words = words[1:]
        for word in words:
            match = _ASSIGNMENT.fullmatch(word)
            if not match:
                break
            name, _, value = match.groups()
            if is_conditional:
                self.conditional.add(name)
            else:
                self.variables[name] = self._substitute(value)

    def _assign_array(self, match: re.Match[str], line: str, *, is_conditional: bool) -> None:
        name, appends = match.groups()
        if is_conditional:
            self.conditional.add(name)
            return
        elements = _split_words(line[match.end() :].rstrip().removesuffix(")")) or []
        earlier = self.arrays.get(name, []) if appends else []
        self.arrays[name] = [*earlier, *self._expand_words(elements)]

    def _expand_words(self, tokens: list[str]) -> list[str]:
        words: list[str] = []
        for token in tokens:
            if token in _ENDS:
                break
            array = _ELEMENTS.fullmatch(token)
            if array:
                words += self.arrays.get(array.group(1), [])
            elif _REFERENCE.fullmatch(token):
                words += self._substitute(token).split()  # a variable may contain several words
            elif token not in ("$@", "$*"):
                words.append(self._substitute(token))
        return words

    def _substitute(self, text: str) -> str:
        """Substitute the variables of a text. Unknown ones become their name between two UNKNOWN."""
        text = _REFERENCE.sub(self._look_up_variable, text)
        marked_sum = f"{_SUM_START}([^{_SUM_END}]*){_SUM_END}"
        return re.sub(marked_sum, lambda match: self._compute_sum(match.group(1)), text)

    def _look_up_variable(self, match: re.Match[str]) -> str:
        name = match.group(1) or match.group(3)
        default = match.group(2)
        if name in self.given:
            self.used.add(name)
            return self.given[name]
        if name == "HOME":
            return str(Path.home())
        value = self.variables.get(name, "")
        if value and (UNKNOWN not in value or name not in self.conditional):
            return value
        return self._substitute(default) if default else f"{UNKNOWN}{name}{UNKNOWN}"

    def _compute_sum(self, expression: str) -> str:
        """Return the value of `$((expression))`, in which names need no `$`."""
        names = expression.replace("$", "")
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self._look_up_operand(match.group()), names)
        if UNKNOWN in text:
            return text
        try:
            # Python refuses numbers with leading zeros.
            return str(_evaluate_sum(ast.parse(text.strip().lstrip("0") or "0", mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"{UNKNOWN}$(({expression})){UNKNOWN}"

    def _look_up_operand(self, name: str) -> str:
        if name in self.given:
            self.used.add(name)
        return self.given.get(name) or self.variables.get(name) or f"{UNKNOWN}{name}{UNKNOWN}"

    def explain_unknown(self, key: str, text: str) -> str:
        """Explain why the value of a key is unknown and how to pass it; "" if it is known."""
        names = re.findall(f"{UNKNOWN}([^{UNKNOWN}]+){UNKNOWN}", text)
        if not names:
            return ""
        name = names[0]
        if name.startswith("$"):
            return f"a command decides it, and nothing is executed here; pass --set {key}=VALUE"
        location = "only inside an if, a case or a loop" if name in self.conditional else "outside of this script"
        return f"{name} is set {location}, and nothing is executed here; pass --set {name}=VALUE"

    def list_conditional(self) -> list[str]:
        """Return the variables whose known value an `if`, a `case` or a loop may change."""
        names = self.conditional & self.variables.keys()
        return sorted(name for name in names if UNKNOWN not in self.variables[name])


def parse_options(words: list[str]) -> dict[str, str]:
    """Parse `--key value`, `--key=value` and `--flag`. Several values become a YAML list."""
    values_by_key: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            values_by_key[key] = [value] if equals else []
        elif key:
            values_by_key[key].append(word)
    return {key: _join_values(values) for key, values in values_by_key.items()}


def _join_values(values: list[str]) -> str:
    if not values:
        return "true"
    if len(values) == 1:
        return values[0]
    return f"[{', '.join(values)}]"


def _evaluate_sum(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_sum(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value: int = _OPERATORS[type(node.op)](_evaluate_sum(node.left), _evaluate_sum(node.right))
        return value
    raise ValueError("no arithmetic")


def _mark_substitutions(text: str) -> str:
    """Replace `$((x))` by a marked x and `$(command)` by an unknown value.

    Both may contain spaces and quotes, and would otherwise be split into words.
    """
    parts: list[str] = []
    position = 0
    while position < len(text):
        if not text.startswith("$(", position):
            parts.append(text[position])
            position += 1
            continue
        end = _find_closing_parenthesis(text, position + 1)
        inner = text[position + 2 : end - 1]
        if inner.startswith("(") and inner.endswith(")"):
            expression = re.sub(r"[ \t{}]", "", inner[1:-1])
            parts.append(f"{_SUM_START}{expression}{_SUM_END}")
        else:
            parts.append(f"{UNKNOWN}$(...){UNKNOWN}")
        position = end
    return "".join(parts)


def _find_closing_parenthesis(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`; the end of the text if none does."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
        if depth == 0:
            return index + 1
    return len(text)


def _split_statements(text: str) -> Iterator[str]:
    """Yield logical lines: continued lines are joined, and so are the lines of an array or a quote."""
    pending = ""
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if _ARRAY.match(pending) and not re.search(r"\)\s*(?:#.*)?$", line):
            continue
        if _split_words(pending) is None and pending.count("\n") < 200:
            continue
        yield pending
        pending = ""


def _split_words(line: str) -> list[str] | None:
    """Split a line into words; None if a quote is still open."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return None
