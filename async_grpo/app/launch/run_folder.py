"""RunFolder: `runs/<name>/`, one experiment. The same command resumes it; another experiment is refused.

    CONFIG (+ overrides)  -->  name and folder of the run  --open_run-->        RunFolder, new or existing
                                                           --find_run-->        configuration with the server's address
                                                           --find_checkpoint--> folder of one of its checkpoints

`find_run` and `find_checkpoint` also accept a folder without CONFIG. They are read-only.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from async_grpo.config import RunConfig, dump, load
from async_grpo.config.load import MACHINE_SECTIONS, RESOLVED_CONFIG, differing_keys, is_in_sections
from async_grpo.errors import ConfigError
from async_grpo.telemetry.logging import copy_log
from async_grpo.telemetry.role_history import count_restarts, read_failure, record_start
from async_grpo.utils.files import is_locked, locked, try_lock, write_atomic
from async_grpo.utils.text import short_digest
from buffer import PASSWORD_VARIABLE
from trainer.checkpoint.manifest import damaged_checkpoint, find_changed_files, read_manifest
from trainer.checkpoint.store import CHOSEN, LATEST

_FREE_KEYS = (
    *MACHINE_SECTIONS,
    *("trainer.platform", "trainer.processes", "trainer.threads", "trainer.take_timeout_s", "trainer.checkpoint"),
    *("trainer.tensor_parallel", "trainer.pipeline_parallel", "trainer.context_parallel", "trainer.expert_parallel"),
    *("trainer.sequence_parallel", "trainer.recompute", "trainer.optimizer.offload"),
    *("trainer.nodes", "trainer.rendezvous"),
    *("rollout.http", "rollout.sample_deadline_s"),
)
"""Keys that may differ when a run is resumed, since they do not change what is learned: the sections about the machine,
the layout of the trainer's work over ranks and memory, and the times of checkpoints. Every layout can read a
checkpoint, so a run that was started on eight devices can continue on two."""
FIND_TIMEOUT_S = 5.0
"""Maximum seconds that `find_run` lets its caller wait for the server, because a person at a terminal is waiting."""
_STATE = "run.json"
_ID = "run.id"
FIRST_TRAINER = "trainer-0"
"""Name of the trainer, or of its node 0 if it has several nodes."""
_LOCK = "run.lock"
"""File that `async-grpo run` locks while it runs in the folder."""
_SAFE_VALUE = re.compile(r"[A-Za-z0-9._-]{1,24}\Z")
_NAME_LENGTH = 64
_MOST_DIGITS = 1e15
"""Integers from this value on are written with an exponent."""


@dataclass
class RunState:
    """run.json: state that is kept between invocations."""

    wall_s: float = 0.0
    """Seconds of all invocations, from the start of their processes to their report."""
    prepare_s: float = 0.0
    """Seconds of generating or downloading the first policy, before `wall_s`; for a cached policy those of its
    warm-up."""
    restarts: dict[str, int] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    """Rollout server that was given up while the run continued -> reason."""
    finished_steps: int = 0
    """Step to which the run has been trained, evaluated and reported; 0 if it is not finished."""
    command: str = ""
    failure: str = ""
    """Message of the error that ended the last invocation; "" without an error."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Files of a run that the launcher reads and writes."""

    path: Path

    @property
    def config_file(self) -> Path:
        """Resolved configuration: `async-grpo run` with it starts the same run."""
        return self.path / RESOLVED_CONFIG

    @property
    def roles_file(self) -> Path:
        """Configuration with the server's address, for the roles that `run` starts and for `find_run`. Roles that are
        started separately overwrite it, each with the values of its own machine."""
        return self.path / "roles.yaml"

    def roles_file_of(self, role: str) -> Path:
        """Return the configuration file of a role that was started separately. Machines that share this folder have
        different values, so each role has its own file."""
        return self.path / "roles" / f"{role}.yaml"

    @property
    def place(self) -> str:
        """HOST:PATH of the folder."""
        return f"{socket.gethostname()}:{self.path}"

    @property
    def id_file(self) -> Path:
        """File with the id that distinguishes this run from others of its name; see `origin`."""
        return self.path / _ID

    @property
    def origin(self) -> str:
        """Id and HOST:PATH, as they are stored on a shared server.

        The id distinguishes this run from others of its name. The first access creates it; it moves with the folder.
        """
        file = self.id_file
        if not file.exists():
            write_atomic(file, uuid.uuid4().hex)
        return f"{file.read_text()} {self.place}"

    def owns(self, origin: str | None) -> bool:
        """True if the run with this origin on a shared server belongs to this folder, according to its id.

        A run without an origin had its roles started separately, with the configuration in this folder.
        """
        if origin is None:
            return self.config_file.exists()
        file = self.id_file
        return file.exists() and origin.partition(" ")[0] == file.read_text()

    def locked(self) -> AbstractContextManager[None]:
        """Lock the run for this process within a `with` block. Raises ConfigError if another process has the lock."""
        busy = ConfigError(
            f"another `async-grpo run` is running in {self.path}. Wait for it, stop it, or give this run another name "
            "(-o name=...)"
        )
        return locked(self.path / _LOCK, busy)

    def has_live_process(self) -> bool:
        """True if a process of this machine runs in this folder: `async-grpo run` or a role that was started
        separately."""
        return any(map(is_locked, self.lock_files()))

    def lock_files(self) -> list[Path]:
        """Return the lock files of `async-grpo run` and of roles that were started separately."""
        return [self.path / _LOCK, *(self.path / "roles").glob("*.lock")]

    def register_role(self, role: str) -> None:
        """Lock the role's file, record its start and copy its log, for a role that is started separately."""
        self.lock_role(role)
        copy_log(self.log(role))
        record_start(self.path / "roles" / f"{role}.jsonl")

    def count_restarts(self) -> dict[str, int]:
        """Return restarts by role, for roles that were started separately: the trainer, and servers with restarts."""
        counts = {file.stem: count_restarts(file) for file in self._histories()}
        trainer = counts.pop(FIRST_TRAINER, 0)
        return {"trainer": trainer, **{role: count for role, count in counts.items() if count}}

    def find_role_failure(self) -> str:
        """Return why the run cannot continue: the failure of a trainer node, or of a rollout server if all of them
        have failed; "" otherwise."""
        trainer_failures = []
        server_failures = []
        for file in self._histories():
            is_alive = is_locked(file.with_suffix(".lock"))
            reason = "" if is_alive else read_failure(file)
            if file.stem.startswith("trainer-"):
                trainer_failures.append(reason)
            else:
                server_failures.append(reason)

        for reason in trainer_failures:
            if reason:
                return reason
        if server_failures and all(server_failures):
            return server_failures[-1]
        return ""

    def _histories(self) -> list[Path]:
        return sorted((self.path / "roles").glob("*.jsonl"))

    def lock_role(self, role: str) -> None:
        """Lock the file of a role that is started separately. Of two processes with the same role, the first has the
        lock."""
        (self.path / "roles").mkdir(exist_ok=True)
        file = os.open(self.path / "roles" / f"{role}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try_lock(file)
        # The process becomes the role by execve. The lock must survive that, so the descriptor is left open.
        os.set_inheritable(file, True)

    def log(self, role: str) -> Path:
        """Return the file for the standard output and errors of a role."""
        return self.path / "logs" / f"{role}.log"

    def read_config(self) -> RunConfig:
        """Read config.yaml, possibly of an earlier release. Raises ConfigError if this release rejects it."""
        return load(self.path)

    def read_state(self) -> RunState:
        """Return the stored state, or an empty one."""
        if not (self.path / _STATE).exists():
            return RunState()
        return RunState(**json.loads((self.path / _STATE).read_text()))

    def write_state(self, state: RunState) -> None:
        """Write run.json atomically."""
        write_atomic(self.path / _STATE, json.dumps(asdict(state), indent=2) + "\n")


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder exists or can be created, and is writable."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"runs_dir and name make the run's folder {folder}, but {existing} is a file. Set runs_dir to a folder, "
            "or move that file away"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"runs_dir and name make the run's folder {folder}, but {existing} cannot be written to by this user "
            f"({os.geteuid()}). Give it to that user, or set runs_dir to another folder"
        )


def open_run(config: RunConfig, *, fresh: bool = False) -> RunFolder:
    """Create the folder of a run, or open an existing one to resume it. `fresh` removes an existing folder first.

    Raises ConfigError if the folder holds another experiment. With `fresh`, raises ConfigError if a process is running
    in the folder, or if it is not the folder of a run.
    """
    folder = RunFolder(config.run_dir.absolute())
    if fresh and folder.path.exists():
        remove_run(folder)
    if folder.config_file.exists():
        _check_same_experiment(folder, config)
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def write_config(folder: RunFolder, config: RunConfig, *, for_roles: RunConfig) -> None:
    """Write config.yaml and roles.yaml. Neither contains secrets, because no configuration does."""
    write_atomic(folder.config_file, dump(config))
    write_atomic(folder.roles_file, dump(for_roles))


def write_role_config(folder: RunFolder, role: str, config: RunConfig) -> Path:
    """Write the configuration file of one role, and return its path."""
    file = folder.roles_file_of(role)
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(file, dump(config))


def run_name(base: str, overrides: Iterable[str]) -> str:
    """Return the name of a run with overrides. Each experiment has its own name, and therefore its own folder.

    Equal values give equal names, in any spelling. A name that is too long is truncated and ends in a digest of the
    full name, so that two experiments never share a folder.

    >>> run_name("quickstart", ["max_staleness=0", "trainer.optimizer.lr=0.0001"])
    'quickstart-max_staleness.0-lr.1e-4'
    """
    values: dict[str, str] = {}  # if a key occurs twice, the last value counts
    for override in overrides:
        key, _, value = override.partition("=")
        values[key] = value
    if "name" in values:
        return base

    parts = [base]
    for key, value in sorted(values.items()):
        if not is_in_sections(key, _FREE_KEYS):
            parts.append(f"{key.split('.')[-1]}.{_spell_value(value)}")
    name = "-".join(parts)
    if len(name) <= _NAME_LENGTH:
        return name
    return f"{name[: _NAME_LENGTH - 9]}-{short_digest(name)}"


def changed_keys(before: Any, after: Any) -> list[str]:
    """Return the dotted keys that differ between two resolved configurations and may not change in a resumed run.

    >>> changed_keys({"seed": 1, "redis": {"url": "a"}}, {"seed": 2, "redis": {"url": "b"}})
    ['seed']
    """
    return differing_keys(before, after, ignored=_FREE_KEYS)


def _spell_value(text: str) -> str:
    """Return the value of an override as part of a name: one spelling for equal values, and a digest for values that a
    file name cannot contain.

    >>> [_spell_value(text) for text in ("1e-4", "0.0001", "1.0E-4", "0.5", "8", "8.0", "True", "a/b")]
    ['1e-4', '1e-4', '1e-4', '0.5', '8', '8', 'true', 'c14cddc0']
    """
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # PyYAML raises ValueError for an invalid date
        value = text
    if isinstance(value, str):
        try:
            value = float(value)  # YAML 1.1 reads 1e-4 as a string, because it has no point; the configuration does not
        except ValueError:
            spelt = value
    if isinstance(value, float):
        spelt = _spell_number(value)
    elif not isinstance(value, str):
        spelt = json.dumps(value, sort_keys=True, default=str)
    return spelt if _SAFE_VALUE.match(spelt) else short_digest(spelt)


def _spell_number(value: float) -> str:
    """Return the shorter of 0.0001 and 1e-4. Whole numbers are written as integers."""
    if value.is_integer() and abs(value) < _MOST_DIGITS:
        return str(int(value))
    plain = repr(value)
    if not math.isfinite(value):
        return plain
    for digits in range(17):  # stop at the first number of digits that gives exactly this value
        mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
        if float(f"{mantissa}e{exponent}") == value:
            break
    scientific = f"{mantissa}e{int(exponent)}"
    if "e" in plain or len(scientific) < len(plain):
        return scientific
    return plain


def remove_run(folder: RunFolder) -> None:
    """Remove the folder of a run. Raises ConfigError if it is not the folder of a run, or a process runs in it."""
    check_is_run(folder)
    with folder.locked():
        shutil.rmtree(folder.path)


def check_is_run(folder: RunFolder) -> None:
    """Raise ConfigError for a folder with files that is not the folder of a run: `--fresh` must not delete it."""
    is_run = folder.config_file.exists() or (folder.path / _LOCK).exists()
    if not is_run and folder.path.exists() and any(folder.path.iterdir()):
        raise ConfigError(
            f"{folder.path} is not a run (it has no config.yaml), so it was not removed. Choose another name"
        )


def _check_same_experiment(folder: RunFolder, config: RunConfig) -> None:
    before = _recorded_values(folder)
    changed = [key for key in changed_keys(before, config.model_dump(mode="json")) if key != "steps"]
    if changed:
        raise ConfigError(
            f"{folder.path} holds a run with other values of {', '.join(changed)}. Resuming it would mix two "
            "experiments. Give this one another `name`, in its configuration if its roles are started separately and "
            "else with -o name=..., or start over with `async-grpo run` and --fresh, which deletes the old one. To "
            f"continue from its weights with other values, set model.path to {folder.path / 'checkpoints' / 'hf'} too"
        )


def _recorded_values(folder: RunFolder) -> Any:
    """Return the values of config.yaml, with defaults for keys that are newer than the file. If this release rejects
    the file, return its raw content."""
    try:
        return folder.read_config().model_dump(mode="json")
    except ConfigError:
        return yaml.safe_load(folder.config_file.read_text())


def find_checkpoint(run_dir: Path, version: int | None) -> tuple[RunConfig, Path]:
    """Return the configuration of a run and the folder of a checkpoint; the newest if `version` is None.

    Raises ConfigError if `run_dir` is not the folder of a run or has no such checkpoint.
    """
    folder = RunFolder(run_dir)
    if not folder.config_file.is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run (it has no {folder.config_file.name}). Check the name")
    checkpoints = run_dir / "checkpoints"
    versions = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal())
    if not versions:
        raise ConfigError(
            f"{run_dir} has no checkpoint yet. The first one is written after trainer.checkpoint.every_steps steps, or "
            "when the run ends"
        )
    wanted = versions[-1] if version is None else version
    if wanted not in versions:
        raise ConfigError(
            f"{run_dir} has no checkpoint of version {wanted}, only of {', '.join(map(str, versions))}. Older ones are "
            "deleted; see trainer.checkpoint.keep and keep_best"
        )
    return folder.read_config(), checkpoints / f"{wanted:08d}"


def choose_checkpoint(run_dir: Path, checkpoint: str) -> int:
    """Make the run in `run_dir` resume from `checkpoint`, a version or its folder. Returns the version.

    The trainer then accepts that the buffer does not hold the steps after it. Raises ConfigError if there is no such
    checkpoint or a process runs in the folder, CheckpointDamaged if the files do not match their checksums.
    """
    name = Path(checkpoint).name
    if not name.isdecimal():
        raise ConfigError(f"--from {checkpoint} is not a checkpoint version. Give its number, such as --from 80")
    _, folder = find_checkpoint(run_dir, int(name))
    manifest = read_manifest(folder)
    damaged = find_changed_files(folder, manifest, manifest.files)
    if damaged:
        raise damaged_checkpoint(folder, f"{', '.join(damaged)} does not hold what was written")
    with RunFolder(run_dir).locked():
        write_atomic(folder.parent / CHOSEN, f"{manifest.version}\n", synced=True)
        write_atomic(folder.parent / LATEST, f"{manifest.version}\n", synced=True)
    return manifest.version


def find_run(config: Path | None, overrides: Sequence[str], run_dir: Path | None) -> RunConfig:
    """Return the configuration of a started run, with `redis.url` set and a short timeout.

    Raises ConfigError if no run or two runs are named, or if the run was never started or its embedded server is gone.
    """
    folder = find_named_folder(config, overrides, run_dir)
    if folder is not None:
        run = _read_started_config(folder)
    elif config is None:
        raise ConfigError("which run? Give its folder, such as runs/NAME, or the CONFIG (and -o) it was started with")
    else:
        run = load(config, overrides)
        run = run.model_copy(update={"name": run_name(run.name, overrides)})
        if run.redis.url is None:
            run = _read_started_config(RunFolder(run.run_dir))
    redis = run.redis.model_copy(update={"timeout_s": min(run.redis.timeout_s, FIND_TIMEOUT_S)})
    return run.model_copy(update={"redis": redis})


def find_named_folder(config: Path | None, overrides: Sequence[str], run_dir: Path | None) -> RunFolder | None:
    """Return the folder of a run that is given as CONFIG or --run-dir; None for a configuration file, or for nothing.

    Raises ConfigError if the run is named twice.
    """
    if run_dir is None and config is not None and config.is_dir():
        config, run_dir = None, config
    if run_dir is None:
        return None
    if config is not None or overrides:
        raise ConfigError(
            "the run is named twice: --run-dir, or a folder instead of CONFIG, already names it. Omit CONFIG and -o, "
            "or omit the folder"
        )
    return RunFolder(run_dir)


def _read_started_config(folder: RunFolder) -> RunConfig:
    if not folder.roles_file.is_file():
        raise ConfigError(
            f"{folder.path} holds no run that was started (it has no {folder.roles_file.name}). Check the name: "
            "overrides (-o) are part of it. A run on a shared server is found by its CONFIG with -o redis.url=..."
        )
    config = load(folder.roles_file)
    if folder.read_config().redis.url is None:
        _check_embedded(config)
    return config


def _check_embedded(config: RunConfig) -> None:
    """Raise ConfigError if the embedded server is gone, which ends with the run. Also drop the password from the
    environment: the embedded server has none, and would refuse a client that sends one."""
    socket = Path(unquote(urlsplit(config.redis.url or "").path))
    if not socket.is_socket():
        raise ConfigError(
            f"the run {config.name} is not running: its embedded server has ended with it ({socket}). "
            "The command that started it resumes it, with the stored content of the buffer"
        )
    os.environ.pop(PASSWORD_VARIABLE, None)
