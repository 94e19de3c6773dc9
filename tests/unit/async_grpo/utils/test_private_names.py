"""Names that other packages do not document are all in one table, and one that has moved is refused by name."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.crc
from redis.asyncio.connection import Connection

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import DependencyError
from async_grpo.utils.private_names import PRIVATE_NAMES, check_private_names
from async_grpo.utils.requirements import numbers
from buffer.redis.client import make_client

ROOT = Path(__file__).parents[4]
PACKAGES = ("async_grpo", "buffer", "rollout_server", "trainer")
DOCUMENTED = {
    "vllm": {"vllm"},
    "redis": {"redis", "redis.asyncio", "redis.asyncio.retry", "redis.backoff", "redis.exceptions"},
}
"""Modules of which any name may be used. Of torch and megatron (pinned exactly): all without an underscore."""
OF_NAMED_TUPLES = {"_replace", "_asdict"}
LISTED = {name for private in PRIVATE_NAMES.values() for name in (*private.names, *private.optional)}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            yield path, ast.parse(path.read_text())


def imported() -> Iterator[str]:
    """`module:name` of every import of one of the packages, and `module:` of every plain one."""
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield from (f"{node.module}:{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (f"{alias.name}:" for alias in node.names)


def is_private(name: str) -> bool:
    module = name.partition(":")[0]
    root = module.partition(".")[0]
    if root in DOCUMENTED:
        return module not in DOCUMENTED[root]
    return root in ("torch", "megatron") and any(part.startswith("_") for part in re.split(r"[.:]", name))


def test_every_import_from_an_undocumented_module_is_in_the_table() -> None:
    private = {name for name in imported() if is_private(name)}
    assert any(name.startswith("vllm.v1") for name in private)
    assert {
        name for name in private if not any(f"{known}.".startswith(f"{name}.".replace(":.", ":")) for known in LISTED)
    } == set()


def test_every_module_of_vllm_that_is_named_in_a_string_is_in_the_table() -> None:
    strings = {
        node.value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"vllm(\.\w+)+", node.value)
    }
    strings -= {"vllm.gpu_memory_utilization"}  # a key of AReaL's configurations
    assert "vllm.v1.executor.uniproc_executor.UniProcExecutor" in strings
    assert {name for name in strings if not any(known.replace(":", ".").startswith(name) for known in LISTED)} == set()


def test_every_private_attribute_that_is_not_our_own_is_in_the_table() -> None:
    private = {name for _, tree in trees() for name in foreign(tree) if re.match(r"_[^_]", name)}
    assert private >= {"_registry", "_connect", "_init_amx"}
    assert private - OF_NAMED_TUPLES - {part for name in LISTED for part in re.split(r"[.:]", name)} == set()


def of_our_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Classes of which every base is a class of this project."""
    ours = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            ours |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            if all(isinstance(base, ast.Name) and base.id in ours for base in bases):
                yield node


def foreign(tree: ast.Module) -> Iterator[str]:
    """Attributes that are read, set or called in a module, and are not defined in it."""
    own = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
    inherited = {id(node) for known in of_our_classes(tree) for node in ast.walk(known)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if id(node) not in inherited:
                    yield name
            case ast.Attribute(value=ast.Name(id=owner)) if (
                owner in ("self", "cls") or owner in sys.stdlib_module_names
            ):
                pass  # of a base class in another module; Python's own
            case ast.Attribute(attr=name) if name not in own:
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name


@pytest.mark.parametrize("user", PRIVATE_NAMES)
def test_pip_is_told_the_same_bounds(user: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    private = PRIVATE_NAMES[user]
    low, high = map(numbers, private.tested)
    stated = [each for each in wanted if re.split(r"[\[<>=]", each)[0] in private.distributions]
    assert stated
    for each in stated:
        if exact := re.search(r"==([\d.]+)", each):
            assert low <= numbers(exact[1]) < high, each
        else:
            assert each.endswith(private.range), each


def test_a_client_of_a_redis_py_that_lost_a_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(redis.crc, "key_slot")
    with pytest.raises(DependencyError, match=r"redis\.crc:key_slot .*redis>=7\.4,<9"):
        make_client(RedisConfig(url="redis://127.0.0.1:1"))


def test_a_method_of_a_class_is_looked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Connection, "_connect")
    monkeypatch.delattr(Connection.__mro__[1], "_connect")
    with pytest.raises(DependencyError, match=r"Connection\._connect"):
        check_private_names("buffer")


@pytest.mark.parametrize(("version", "refused"), [("7.3.9", True), ("7.4", False), ("8.9.9", False), ("9.0.0b1", True)])
def test_a_release_that_was_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, refused: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: version)
    if not refused:
        check_private_names("buffer")
        return
    with pytest.raises(DependencyError, match=rf"redis .*{version}.* >=7\.4,<9"):
        check_private_names("buffer")


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", none)
    with pytest.raises(DependencyError, match="megatron-core is not installed"):
        check_private_names("trainer")


@pytest.mark.parametrize(
    ("user", "module", "moved", "missing"),
    [
        ("engine", "vllm.v1.engine.output_processor", "RequestState", "RequestState.request_id"),
        ("trainer", "megatron.core.models.gpt", "GPTModel._postprocess", "GPTModel._postprocess"),
    ],
)
def test_what_the_installed_packages_have_is_found_and_what_they_lose_is_named(
    user: str, module: str, moved: str, missing: str
) -> None:
    program = (
        "from async_grpo.utils.private_names import check_private_names as check\n"
        f"check({user!r})\n"
        f"import {module} as module\n"
        f"del module.{moved}\n"
        f"check({user!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert re.search(
        rf"DependencyError: \S+ \S+ has no {re.escape(f'{module}:{missing}')} .*Run: pip install", done.stderr
    )
    assert "line 5" in done.stderr  # the first check found all of them
