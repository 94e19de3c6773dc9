"""The environment of verifiers: what a Python program needs, and nothing that is secret unless it is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from async_grpo.errors import ConfigError
from async_grpo.process import MARK_VARIABLE

PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    MARK_VARIABLE,
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""1 unless they are set: `rewards.workers` says how much runs at the same time."""


def worker_environment(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """PASSED, LC_*, THREADS, and the `named` ones. Raises ConfigError if one of those is not set."""
    if missing := [name for name in named if name not in environment]:
        raise ConfigError(
            f"rewards.environment names {', '.join(missing)}, which is not set here. "
            "Set it where the rollout server starts, or take it off the list"
        )
    kept = {name: value for name, value in environment.items() if name in PASSED or name.startswith("LC_")}
    threads = {name: environment.get(name, "1") for name in THREADS}
    return {**kept, **threads, **{name: environment[name] for name in named}}
