"""Every command that README.md and docs/ show is one that works; see tests/support/doc_commands.py."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from async_grpo.app.cli.main import app
from async_grpo.config import RunConfig, load
from async_grpo.config.load import dotted_keys
from tests.support.doc_commands import NOT_RUN, ROOT, DocCommand, commands, spellings

CLI = typer.main.get_command(app)
COMMANDS = commands()
SECTIONS_AND_KEYS = set(dotted_keys(RunConfig))
KEYS = {key for key in SECTIONS_AND_KEYS if not any(name.startswith(f"{key}.") for name in SECTIONS_AND_KEYS)}
PLACEHOLDERS = ("key", "section.key", "a.b.c", "KEY")


def found(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and its arguments."""
    command: Any = CLI
    rest = words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def values_of(words: list[str], *options: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words[:-1]) if word in options]


def check_keys(words: list[str]) -> None:
    """`-o` and `--grid` name keys that exist, and with a shipped configuration their values are valid."""
    pairs = [pair for pair in values_of(words, "-o", "--override", "--grid") if "=" in pair]
    for pair in pairs:
        key = pair.partition("=")[0]
        known = (
            key in KEYS
            or any(key.startswith(f"{name}.") for name in KEYS)
            or any(name.startswith(f"{key}.") for name in KEYS)
        )
        assert known or key in PLACEHOLDERS, f"there is no key {key}"
    for file in (word for word in words if word.startswith("configs/")):
        assert (ROOT / file).is_file(), f"there is no file {file}"
        load(ROOT / file, [pair for pair in values_of(words, "-o") if "=" in pair])


def check_async_grpo(command: DocCommand) -> None:
    for words in spellings(command.text):
        parsed, rest = found(shlex.split(shlex.join(words)) if "'" not in command.text else shlex.split(command.text))
        assert parsed is not CLI or not rest or rest[0].startswith("-"), f"there is no command {rest[0]}"
        options = {name for parameter in parsed.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in rest:
            name = word.partition("=")[0]
            assert not re.match(r"--?[a-z]", name) or name in {*options, "--help"}, (
                f"{parsed.name} has no option {name}"
            )
        if (
            not command.inline
            and " | " not in command.text
            and parsed is not CLI
            and not getattr(parsed, "commands", None)
            and "--help" not in rest
        ):
            parsed.make_context(parsed.name, list(rest))
        check_keys(words)


def check_make(command: DocCommand) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in spellings(command.text):
        named = [word for word in words[1:] if "=" not in word]
        assert set(named) <= targets, f"make has no target {named}"


def check_python(command: DocCommand) -> None:
    words = shlex.split(command.text)[1:]
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, f"there is no module {words[1]}"
    else:
        assert (ROOT / words[0]).is_file(), f"there is no file {words[0]}"


CHECKS = {"async-grpo": check_async_grpo, "make": check_make, "python": check_python, "python3": check_python}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_the_documentation_is_one_that_works(command: DocCommand) -> None:
    check = CHECKS.get(command.text.split()[0])
    if check is not None:
        check(command)
    else:
        assert any(re.match(pattern, command.text) for pattern in NOT_RUN), (
            f"{command}: nothing checks this command. Give it a check, or a reason in NOT_RUN"
        )


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 100
    assert {Path(command.page).name for command in COMMANDS} >= {"README.md", "data.md", "one-machine.md"}


def test_a_wrong_option_and_a_wrong_key_are_found() -> None:
    with pytest.raises(AssertionError, match="no option --stalness"):
        check_async_grpo(DocCommand("page", 1, "async-grpo sweep configs/quickstart.yaml --stalness 1", inline=False))
    with pytest.raises(AssertionError, match="no key max_stalenes"):
        check_async_grpo(
            DocCommand("page", 1, "async-grpo run configs/quickstart.yaml -o max_stalenes=0", inline=False)
        )
    with pytest.raises(AssertionError, match="no command view2"):
        check_async_grpo(DocCommand("page", 1, "async-grpo view2 runs", inline=False))


def test_alternatives_are_spelled_out() -> None:
    assert spellings("async-grpo buffer stats | inspect [--json]") == [
        ["async-grpo", "buffer", "stats"],
        ["async-grpo", "buffer", "inspect", "--json"],
    ]
