"""What a check has found, and how the checks look at the installation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from async_grpo.versions import installed


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok` None: worth knowing, needed by nobody. `fix`: what to type where it is not ok."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""


Check = Callable[[], Finding]


def exactly(name: str, distribution: str, wanted: str, fix: str) -> Finding:
    """A package of which only one version is right."""
    version = installed(distribution)
    found = version or "not installed"
    return Finding(name, version == wanted, found if version == wanted else f"{found}, not {wanted}", fix)


def present(name: str, distribution: str, fix: str) -> Finding:
    """A package of which any version that pip accepted will do."""
    version = installed(distribution)
    return Finding(name, version is not None, version or "not installed", fix)


def optional(name: str, distribution: str, fix: str) -> Finding:
    """A package that helps where it is."""
    version = installed(distribution)
    return Finding(name, True if version else None, version or "not installed", fix)
