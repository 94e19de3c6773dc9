"""What the Dockerfiles of deploy/ promise, read from them; nothing is built."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from async_grpo.utils.requirements import VLLM_ASCEND
from tests.support.deploy_files import (
    DOCKERFILES,
    ROOT,
    arguments_of,
    each_dockerfile,
    each_platform,
    instructions,
    is_pinned,
    services_of,
    stages,
    words_of,
)


@each_dockerfile
def test_a_dockerfile_builds_on_pinned_bases_ends_without_rights_and_holds_no_secret(path: Path) -> None:
    bases = [base.partition(" AS ") for base in words_of(path, "FROM")]
    own, values = {name for _, _, name in bases}, arguments_of(path)
    assert len(bases) >= 2
    for base, _, _ in bases:
        variable = re.fullmatch(r"\$\{(\w+)\}", base)
        assert base in own or (variable and is_pinned(values[variable.group(1)])), base
    assert [rest for word, rest in stages(path)[-1] if word == "USER"][-1] == "${APP_UID}"
    assert int(values["APP_UID"]) > 0
    given = [rest for word, rest in instructions(path) if word in ("ARG", "ENV", "LABEL")]
    assert not [rest for rest in given if re.search(r"(?i)password|secret|token|api_?key", rest)]


@each_dockerfile
def test_whatever_is_installed_comes_from_the_index_and_the_certificates_that_were_given(path: Path) -> None:
    """A build argument counts only in the stage that names it; a stage inherits what the one that it is from has."""
    certified: set[str] = set()
    for stage in stages(path):
        base, _, name = stage[0][1].partition(" AS ")
        given = {rest.partition("=")[0] for word, rest in stage if word == "ARG"}
        if "EXTRA_CA_CERT" in given or base in certified:
            certified.add(name)
        if any("pip install" in rest or "pip wheel" in rest for word, rest in stage if word == "RUN"):
            assert "PIP_INDEX_URL" in given
            assert name in certified


@each_dockerfile
def test_what_a_dockerfile_copies_is_there_and_in_the_context_which_is_closed_otherwise(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    copied = [rest.split()[:-1] for rest in words_of(path, "COPY") if not rest.startswith("--from")]
    for source in (source for sources in copied for source in sources):
        assert source not in (".", "./", "deploy", "runs", ".venv")
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, f"{entry}*") for entry in allowed), source


def test_images_are_of_the_versions_that_the_code_is_written_for() -> None:
    ascend, cuda = arguments_of(DOCKERFILES[2]), arguments_of(DOCKERFILES[1])
    assert ascend["ASCEND_IMAGE"] == f"quay.io/ascend/vllm-ascend:v{VLLM_ASCEND}"
    major, minor = map(int, cuda["VLLM_IMAGE"].rpartition(":v")[2].split(".")[:2])
    assert (major, minor) >= (0, 23) and (major, minor) < (0, 33)  # the extra rollout-cuda


@each_platform
def test_compose_builds_with_the_defaults_of_the_dockerfile(platform: str) -> None:
    build = services_of(platform)["secrets"]["build"]
    assert build["dockerfile"] == f"deploy/{platform}.Dockerfile"
    given = dict(build["args"])
    if platform == "ascend":
        del given["PYTHON_IMAGE"]  # of the other two Dockerfiles
    assert given.items() <= arguments_of(ROOT / build["dockerfile"]).items()


@each_dockerfile
def test_packages_are_installed_where_the_base_image_forbids_it(path: Path) -> None:
    """Debian's Python has a file EXTERNALLY-MANAGED, with which pip installs only into virtual environments."""
    for stage in stages(path):
        text = " ".join(rest for _, rest in stage)
        if "pip install" in text or "/deploy/install" in text:
            assert "PIP_BREAK_SYSTEM_PACKAGES=1" in text
