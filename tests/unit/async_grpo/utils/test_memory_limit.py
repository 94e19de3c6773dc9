"""The memory limit of a cgroup, in trees of both versions and in a real group of this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.utils.memory_limit import cgroup_memory_limit

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


def tree(root: Path, groups: str, **limits: int | str) -> Path:
    """A root folder with /proc/self/cgroup and, by path with `__` for `/`, files of /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    name = "memory.max" if groups.startswith("0::") else "memory.limit_in_bytes"
    for group, limit in limits.items():
        folder = root / "sys/fs/cgroup" / group.strip("_").replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{limit}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/pod/container\n", {"pod__container": 8 * GIB}, 8 * GIB),
        ("0::/pod/container\n", {"pod__container": "max", "pod": 4 * GIB}, 4 * GIB),
        ("0::/\n", {"_": 2 * GIB}, 2 * GIB),  # a container with a namespace of its own
        ("0::/job\n", {"job": "max"}, None),
        ("5:cpu:/a\n4:memory:/job/step\n", {"memory__job__step": UNLIMITED_V1, "memory__job": 6 * GIB}, 6 * GIB),
        # A container without a cgroup namespace is shown the host's path; the folder itself is the container's.
        ("4:memory:/docker/0123\n0::/\n", {"memory": 3 * GIB}, 3 * GIB),
    ],
)
def test_the_lowest_limit_of_a_group_and_its_parents_holds(
    tmp_path: Path, groups: str, limits: dict[str, int | str], expected: int | None
) -> None:
    assert cgroup_memory_limit(tree(tmp_path, groups, **limits)) == expected


def test_a_system_without_cgroups_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_memory_limit(tmp_path) is None


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real group below that of this process, limited to 4 GiB."""
    entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    has_v1 = any("memory" in controllers.split(",") for _, controllers, _ in entries)
    base = Path("/sys/fs/cgroup/memory" if has_v1 else "/sys/fs/cgroup")
    path = next(path for _, controllers, path in entries if ("memory" if has_v1 else "") in controllers.split(","))
    group = base / path.lstrip("/") / "async-grpo-test"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if has_v1 else "memory.max")).write_text(str(4 * GIB))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"this user may not make a cgroup with a memory limit: {error}")
    yield group
    group.rmdir()


def test_a_process_in_a_limited_group_finds_the_limit(limited_group: Path) -> None:
    code = (
        "from async_grpo.lab.doctor import check_memory; from async_grpo.utils.memory_limit import *; "
        "from trainer.platform.cpu import CpuPlatform; "
        "print(cgroup_memory_limit(), total_memory(), CpuPlatform().memory_use().total_bytes, available_memory())"
    )
    joined = f"echo $$ > {limited_group}/cgroup.procs && exec {sys.executable} -c '{code}'"
    printed = subprocess.run(["bash", "-c", joined], capture_output=True, text=True, check=True, timeout=60)
    *limits, available = map(int, printed.stdout.split())
    assert limits == [4 * GIB] * 3 and available <= 4 * GIB
