"""Reads launch scripts as text: the arguments of the program that they start. Nothing is executed.

Understood are assignments outside of `if`, `case`, loops and functions, `${NAME}`, `${NAME:-default}`,
`$((arithmetic))` and arrays. What a script computes otherwise, or takes from its environment, must be told
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
_OPENERS, _CLOSERS = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_ENDS = {"|", "||", "&&", ">", ">>", "<", "&", ";", "2>&1", "&>"}
UNKNOWN = "\x00"
"""Marks a part of a word whose value is not in the script; the variable's name follows it."""
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
    """Values that the user gives; they override the script, as an environment overrides `${NAME:-default}`."""
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    """Variables that are only set inside an `if`, a `case`, a loop or a function."""
    used: set[str] = field(default_factory=set)
    """Given variables that the script refers to."""

    def words(self, text: str, program: re.Pattern[str]) -> tuple[str, list[str]]:
        """The program that matches and its arguments, with variables substituted. Raises ConfigError."""
        found: list[tuple[str, list[str]]] = []
        depth = 0
        for line in _statements(_fold(text)):
            tokens = _split(line) or [""]
            bare = [token.rstrip(";") for token in tokens]
            depth += bare[0] in _OPENERS or tokens[-1] == "{"
            if match := next((number for number, token in enumerate(tokens) if program.fullmatch(token)), None):
                found.append((tokens[match], self._expanded(tokens[match + 1 :])))
            else:
                self._assign(line, bare, hidden=depth > 0)
            depth -= sum(token in _CLOSERS for token in bare) + (bare == ["}"])
            depth = max(depth, 0)
        if len(found) != 1:
            raise ConfigError(
                f"the script starts {len(found)} programs that match {program.pattern}, and one is needed. Keep one "
                "launch command in the file"
            )
        return found[0]

    def _assign(self, line: str, tokens: list[str], *, hidden: bool) -> None:
        if match := _ARRAY.match(line):
            name, adds = match.group(1), match.group(2)
            if hidden:
                self.hidden.add(name)
                return
            body = line[match.end() :].rstrip().removesuffix(")")
            words = _split(body) or []
            self.arrays[name] = [*(self.arrays.get(name, []) if adds else []), *self._expanded(words)]
            return
        for token in tokens[1:] if tokens[0] in ("export", "local", "readonly") else tokens:
            if not (match := _ASSIGNMENT.fullmatch(token)):
                break
            name, _, value = match.groups()
            if hidden:
                self.hidden.add(name)
            else:
                self.variables[name] = self._filled(value)

    def _expanded(self, tokens: list[str]) -> list[str]:
        words: list[str] = []
        for token in tokens:
            if token in _ENDS:
                break
            if array := _ELEMENTS.fullmatch(token):
                words += self.arrays.get(array.group(1), [])
            elif _REFERENCE.fullmatch(token):
                words += self._filled(token).split()  # a variable that holds several words
            elif token not in ("$@", "$*"):
                words.append(self._filled(token))
        return words

    def _filled(self, text: str) -> str:
        """The text with its variables substituted; unknown ones become UNKNOWN and their name."""
        text = _REFERENCE.sub(self._value, text)
        return re.sub("\x01([^\x02]*)\x02", lambda match: self._sum(match.group(1)), text)

    def _value(self, match: re.Match[str]) -> str:
        name, default = match.group(1) or match.group(3), match.group(2)
        if name in self.given:
            self.used.add(name)
            return self.given[name]
        if name == "HOME":
            return str(Path.home())
        value = self.variables.get(name, "")
        if value and (UNKNOWN not in value or name not in self.hidden):
            return value
        return self._filled(default) if default else f"{UNKNOWN}{name}{UNKNOWN}"

    def _sum(self, expression: str) -> str:
        """The value of `$((expression))`, in which names need no `$`."""
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self._named(match.group()), expression.replace("$", ""))
        if UNKNOWN in text:
            return text
        try:
            return str(_evaluate(ast.parse(text.strip().lstrip("0") or "0", mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"{UNKNOWN}$(({expression})){UNKNOWN}"

    def _named(self, name: str) -> str:
        self.used |= {name} & self.given.keys()
        return self.given.get(name) or self.variables.get(name) or f"{UNKNOWN}{name}{UNKNOWN}"

    def reason(self, key: str, text: str) -> str:
        """Why the value of a key is unknown and how to give it; "" if it is known."""
        names = re.findall(f"{UNKNOWN}([^{UNKNOWN}]+){UNKNOWN}", text)
        if not names:
            return ""
        if names[0].startswith("$"):
            return f"a command decides it, and nothing is executed here; pass --set {key}=VALUE"
        inside = " only inside an if, a case or a loop" if names[0] in self.hidden else " outside of this script"
        return f"{names[0]} is set{inside}, and nothing is executed here; pass --set {names[0]}=VALUE"

    def doubtful(self) -> list[str]:
        """Variables whose known value an `if`, a `case` or a loop may change."""
        return sorted(name for name in self.hidden & self.variables.keys() if UNKNOWN not in self.variables[name])


def options(words: list[str]) -> dict[str, str]:
    """`--key value`, `--key=value` and `--flag` -> key and value; several values are a list, as YAML writes it."""
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            found[key] = [value] if equals else []
        elif key:
            found[key].append(word)
    return {
        key: "true" if not values else values[0] if len(values) == 1 else f"[{', '.join(values)}]"
        for key, values in found.items()
    }


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value: int = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        return value
    raise ValueError("no arithmetic")


def _fold(text: str) -> str:
    """`$((x))` becomes \\x01x\\x02 and `$(command)` an unknown value, so that they split like words."""
    out: list[str] = []
    at = 0
    while at < len(text):
        if not text.startswith("$(", at):
            out.append(text[at])
            at += 1
            continue
        end, depth = at + 1, 0
        while end < len(text):
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
            if depth == 0:
                break
        inner = text[at + 2 : end - 1]
        if inner.startswith("(") and inner.endswith(")"):
            expression = re.sub(r"[ \t{}]", "", inner[1:-1])
            out.append(f"\x01{expression}\x02")
        else:
            out.append(f"{UNKNOWN}$(...){UNKNOWN}")
        at = end
    return "".join(out)


def _statements(text: str) -> Iterator[str]:
    """Logical lines: continued lines are joined, and an array or a quote that spans lines is one."""
    pending = ""
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if _ARRAY.match(pending) and not re.search(r"\)\s*(?:#.*)?$", line):
            continue
        if _split(pending) is None and pending.count("\n") < 200:
            continue
        yield pending
        pending = ""


def _split(line: str) -> list[str] | None:
    """The words of a line; None if a quote is still open."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return None
