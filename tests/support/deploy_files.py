"""Files of deploy/ for the tests that read them: Compose's services, Dockerfiles, configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_grpo.config import RunConfig, load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = DEPLOY / "scripts"
PLATFORMS = ("cpu", "cuda", "ascend")
DOCKERFILES = [DEPLOY / f"{platform}.Dockerfile" for platform in PLATFORMS]
SECRETS = {
    "ASYNC_GRPO_REDIS_PASSWORD": "redis",
    "ASYNC_GRPO_WEIGHTS_SECRET": "weights",
    "ASYNC_GRPO_HTTP_KEY": "http",
    "ASYNC_GRPO_ADMIN_TOKEN": "http",
}
"""Secret -> its folder, which is a volume of its own."""
SECRETS_SERVICE = "secrets"
STAYING = ("redis", "prometheus", "grafana", "view")
"""Services that run until they are stopped; the others end with the run."""

STACKS = {
    "cpu": ("compose.yaml",),
    "cuda": ("compose.yaml", "compose.cuda.yaml"),
    "ascend": ("compose.yaml", "compose.ascend.yaml"),
    "monitoring": ("compose.yaml", "compose.monitoring.yaml"),
}
"""Compose files that are used together."""
COMPOSE_TEXT = "".join(path.read_text() for path in sorted(DEPLOY.glob("compose*.yaml")))
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+):-([^}]*)\}")


def services_of(stack: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Return the services of a stack as Compose merges and fills them with these variables set, and no others."""
    merged: dict[str, Any] = {}
    for file in STACKS[stack]:
        content = yaml.safe_load((DEPLOY / file).read_text())
        merged = _merge(merged, _fill(content["services"], environment))
    return merged


def _fill(node: Any, environment: dict[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _fill(value, environment) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill(value, environment) for value in node]
    if not isinstance(node, str):
        return node
    return VARIABLE.sub(lambda match: environment.get(match[1]) or match[2], node).replace("$$", "$")


def _merge(base: Any, over: Any, key: str = "") -> Any:
    """Merge as Compose does: mappings by key, lists by appending, commands by replacing."""
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(base)
        for name, value in over.items():
            merged[name] = _merge(base[name], value, name) if name in base else value
        return merged
    if isinstance(base, list) and isinstance(over, list) and key not in ("command", "entrypoint", "test"):
        return [*base, *over]
    return over


SERVICES = services_of("cpu")

each_service = pytest.mark.parametrize(
    ("stack", "name"), [(stack, name) for stack in STACKS for name in services_of(stack)]
)
each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
each_platform = pytest.mark.parametrize("platform", PLATFORMS)


def config_of(platform: str) -> RunConfig:
    return load(DEPLOY / "configs" / f"{platform}.yaml")


def seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(word, rest) of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    split = [line.strip().partition(" ") for line in text.splitlines() if line.strip()]
    return [(word.upper(), rest.strip()) for word, _, rest in split]


def words_of(path: Path, word: str) -> list[str]:
    return [rest for found, rest in instructions(path) if found == word]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for instruction in instructions(path):
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def arguments_of(path: Path) -> dict[str, str]:
    return {name: value.strip('"') for name, _, value in (rest.partition("=") for rest in words_of(path, "ARG"))}


def is_pinned(image: str) -> bool:
    """By digest, or by a tag that names a version."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return "@sha256:" in image or bool(re.search(r"\d+\.\d+\.\d+", tag))
