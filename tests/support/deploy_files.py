"""What stands in deploy/, for tests that read it: compose's services, Dockerfiles, configurations."""

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
PROFILES = ("cpu", "cuda", "ascend")
DOCKERFILES = [DEPLOY / f"{profile}.Dockerfile" for profile in PROFILES]
SECRETS = ("ASYNC_GRPO_REDIS_PASSWORD", "ASYNC_GRPO_HTTP_KEY", "ASYNC_GRPO_ADMIN_TOKEN", "ASYNC_GRPO_WEIGHTS_SECRET")
SECRETS_SERVICE = "secrets"
STAYING = ("redis", "prometheus", "grafana", "view")
"""Services that are there as long as anybody may want them; the others end with the run."""

COMPOSE_TEXT = (DEPLOY / "compose.yaml").read_text()
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+):-([^}]*)\}")


def render(**environment: str) -> dict[str, dict[str, Any]]:
    """The services as compose reads them with those variables set, and no others."""

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled(value) for key, value in node.items()}
        if isinstance(node, list):
            return [filled(value) for value in node]
        if not isinstance(node, str):
            return node
        return VARIABLE.sub(lambda found: environment.get(found[1]) or found[2], node).replace("$$", "$")

    services: dict[str, dict[str, Any]] = filled(yaml.safe_load(COMPOSE_TEXT)["services"])
    return services


SERVICES = render()

each_service = pytest.mark.parametrize("name", SERVICES)
each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
each_profile = pytest.mark.parametrize("profile", PROFILES)


def services_of(profile: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in SERVICES.items() if profile in service["profiles"]}


def role(profile: str, kind: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services_of(profile).items() if name.startswith(kind)}


def config_of(profile: str) -> RunConfig:
    return load(DEPLOY / "configs" / f"{profile}.yaml")


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
