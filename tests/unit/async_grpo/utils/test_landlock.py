"""Files that a process can and cannot read after `hide_folder`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.utils.landlock import can_hide_folders

pytestmark = pytest.mark.skipif(not can_hide_folders(), reason="the kernel has no Landlock")

PROGRAM = """
import subprocess, sys
from pathlib import Path
from async_grpo.utils.landlock import hide_folder
hide_folder(Path(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        Path(path).read_bytes()
        print("read")
    except PermissionError:
        print("refused")
print("child", subprocess.run(["cat", sys.argv[2]], capture_output=True).returncode)
"""


def read_after_hiding(folder: Path, *paths: Path) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, folder, *paths]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_hidden_files_are_unreadable_for_a_process_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "secrets" / "http").mkdir(parents=True)
    secret, other = tmp_path / "secrets" / "http" / "KEY", tmp_path / "other"
    secret.write_text("secret")
    other.write_text("not secret")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "secrets")
    read = read_after_hiding(tmp_path / "secrets", secret, link / "http" / "KEY", other, Path("/proc/self/environ"))
    assert read == ["refused", "refused", "read", "read", "child 1"]


def test_the_folder_can_be_given_and_reached_through_links(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    secret = tmp_path / "secrets" / "KEY"
    secret.write_text("secret")
    (tmp_path / "given").symlink_to("secrets")
    (tmp_path / "parent").symlink_to(tmp_path)
    read = read_after_hiding(tmp_path / "given", secret, tmp_path / "parent" / "secrets" / "KEY")
    assert read == ["refused", "refused", "child 1"]


SERVER = """
import subprocess, sys
reader = "from pathlib import Path; import os; Path(f'/proc/{os.getppid()}/environ').read_bytes()"
hiding = "from async_grpo.utils.landlock import *; hide_folder(Path(sys.argv[1]));"
for program in (reader, "import sys;" + hiding + reader):
    ended = subprocess.run([sys.executable, "-c", program, sys.argv[1]], capture_output=True, text=True)
    print(ended.stderr.splitlines()[-1].partition(":")[0] if ended.returncode else "read")
"""


def test_the_environment_of_the_server_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    # Containers have no capabilities. With CAP_PERFMON a process may look into any other.
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*without, sys.executable, "-c", SERVER, tmp_path / "secrets"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == ["read", "PermissionError"], ended.stderr
