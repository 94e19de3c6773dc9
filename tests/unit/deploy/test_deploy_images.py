"""What the Dockerfiles of deploy/ promise, read from them; nothing is built."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from async_grpo.utils.requirements import MINDSPEED_BRANCH, VLLM_ASCEND
from tests.support.deploy_files import (
    DOCKERFILES,
    ROOT,
    arguments_of,
    default,
    each_dockerfile,
    each_profile,
    instructions,
    is_pinned,
    role,
    stages,
    words_of,
)


@each_dockerfile
def test_a_dockerfile_has_stages_and_its_bases_are_pinned(path: Path) -> None:
    bases = words_of(path, "FROM")
    own = {base.partition(" AS ")[2] for base in bases} - {""}
    assert len(bases) >= 2
    values = arguments_of(path)
    for base in (base.partition(" AS ")[0] for base in bases):
        variable = re.fullmatch(r"\$\{(\w+)\}", base)
        assert base in own or (variable and is_pinned(values[variable.group(1)])), base


@each_dockerfile
def test_a_dockerfile_ends_as_a_user_without_rights(path: Path) -> None:
    users = [rest for word, rest in stages(path)[-1] if word == "USER"]
    assert users[-1] == "${APP_UID}"
    assert int(arguments_of(path)["APP_UID"]) > 0


@each_dockerfile
def test_whatever_is_installed_comes_from_the_index_and_the_certificates_that_were_given(path: Path) -> None:
    """A build argument counts only in the stage that names it; a stage inherits what the one that it is from has."""
    named: dict[str, set[str]] = {}
    for stage in stages(path):
        base, _, name = stage[0][1].partition(" AS ")
        given = {rest.partition("=")[0] for word, rest in stage if word == "ARG"}
        certificates = {"EXTRA_CA_CERT"} & (given | named.get(base, set()))
        named[name] = certificates
        if any("pip install" in rest or "pip wheel" in rest for word, rest in stage if word == "RUN"):
            assert "PIP_INDEX_URL" in given
            assert certificates


@each_dockerfile
def test_a_dockerfile_holds_no_secret(path: Path) -> None:
    given = [rest for word, rest in instructions(path) if word in ("ARG", "ENV", "LABEL")]
    assert not [rest for rest in given if re.search(r"(?i)password|secret|token|api_?key", rest)]


@each_dockerfile
def test_what_a_dockerfile_copies_is_there_and_in_the_context(path: Path) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]  # the file begins by leaving everything out
    for rest in words_of(path, "COPY"):
        if rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, f"{entry}*") for entry in allowed), source


@each_dockerfile
def test_the_context_of_a_build_has_no_environment_runs_or_settings(path: Path) -> None:
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    copied = {source for rest in words_of(path, "COPY") for source in rest.split()[:-1]}
    assert not copied & {".", "./", "deploy", "runs", ".venv"}


def test_images_are_of_the_versions_that_the_code_is_written_for() -> None:
    ascend, cuda = arguments_of(DOCKERFILES[2]), arguments_of(DOCKERFILES[1])
    assert ascend["ASCEND_IMAGE"] == f"quay.io/ascend/vllm-ascend:v{VLLM_ASCEND}"
    assert ascend["MINDSPEED_REF"] == MINDSPEED_BRANCH
    major, minor = map(int, cuda["VLLM_IMAGE"].rpartition(":v")[2].split(".")[:2])
    assert (major, minor) >= (0, 23) and (major, minor) < (0, 33)  # the extra rollout-cuda


@each_profile
def test_compose_builds_with_the_defaults_of_the_dockerfile(profile: str) -> None:
    (trainer,) = role(profile, "trainer").values()
    values = arguments_of(ROOT / trainer["build"]["dockerfile"])
    for name, value in trainer["build"]["args"].items():
        assert values[name] == default(value), name
