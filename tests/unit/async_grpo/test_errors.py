"""The tree of errors, drawn at the top of `async_grpo.errors`, has every exception of the project."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from async_grpo import errors

ROOT = Path(__file__).parents[3]
PACKAGES = ("async_grpo", "buffer", "rollout_server", "trainer")


def drawn() -> dict[str, str]:
    """Parent by name."""
    found, above = {}, {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"([│ ]*[├└]── )?([A-Z]\w+)(?:$|  +\S)", line):
            depth = len(match[1] or "") // 4
            above[depth] = match[2]
            found[match[2]] = above[depth - 1] if depth else "Exception"
    return found


def signals() -> set[str]:
    return set(re.findall(r"(\w+)\s+\([a-z_.]+\)", (errors.__doc__ or "").partition("Signals")[2]))


def defined() -> Iterator[tuple[str, str]]:
    """(name, base) of every class in the project that is not private."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    yield from ((node.name, ast.unparse(base)) for base in node.bases)


def is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def test_every_error_stands_in_the_tree_below_its_parent() -> None:
    tree, classes = drawn(), dict(defined())
    derived = {name: base for name, base in classes.items() if base in tree or name == "AsyncGrpoError"}
    assert derived == tree


def test_what_is_no_error_of_the_tree_is_named_as_a_signal() -> None:
    others = {name for name, base in defined() if is_exception(base) and name not in drawn()}
    assert others == signals()
