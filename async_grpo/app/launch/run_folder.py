"""RunFolder: `runs/<name>/`, one experiment. The same command again resumes it; another experiment is refused.

    CONFIG (+ overrides)  -->  name and folder of the run  --open_run-->        RunFolder, made or taken up
                                                           --find_run-->        configuration with the server's address
                                                           --find_checkpoint--> folder of one of its checkpoints

`find_run` and `find_checkpoint` also start from the folder alone; they make, start and write nothing.
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
from async_grpo.telemetry.role_history import failure, record_start, restarts
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
"""Keys that may change between a run and its resumption, since they do not change what is learned: the sections of a
machine, how the trainer's work is laid out over ranks and memory, and when it saves. Any layout reads a checkpoint, so
that a run begun on eight devices goes on with two."""
PATIENCE_S = 5.0
"""Seconds to wait for the server in `find_run`, at most: a person at a terminal waits for the answer."""
_STATE = "run.json"
_ID = "run.id"
FIRST_TRAINER = "trainer-0"
"""Name of the trainer, or of its node 0 if it has several."""
_LOCK = "run.lock"
"""The file that the process at work in the folder holds."""
_SAFE_VALUE = re.compile(r"[A-Za-z0-9._-]{1,24}\Z")
_NAME_LENGTH = 64
_MOST_DIGITS = 1e15
"""Whole numbers from here on are spelt with an exponent."""


@dataclass
class RunState:
    """run.json: what the supervisor remembers between invocations."""

    wall_s: float = 0.0
    """Seconds of all invocations, from the start of their processes to their report."""
    prepare_s: float = 0.0
    """Seconds before that in which the first policy was made or fetched; of a cached one, those of its warm-up."""
    restarts: dict[str, int] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    """Rollout server without which the run went on -> why it was given up."""
    finished_steps: int = 0
    """The step to which the run was trained, evaluated and reported; 0 if it has not come to its end."""
    command: str = ""
    failure: str = ""
    """The message of the error that ended the last invocation; "" if none did."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run that the supervisor itself reads and writes."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved configuration: `async-grpo run` with it makes the same run."""
        return self.path / RESOLVED_CONFIG

    @property
    def roles_file(self) -> Path:
        """The configuration with the server's address, for the roles that `run` starts and for `find_run`. Roles that
        are started one by one write it in turn, each with the values of its own machine."""
        return self.path / "roles.yaml"

    def roles_file_of(self, role: str) -> Path:
        """The configuration of a role that was started on its own; other machines that share this folder have other
        values."""
        return self.path / "roles" / f"{role}.yaml"

    @property
    def place(self) -> str:
        """HOST:PATH of the folder."""
        return f"{socket.gethostname()}:{self.path}"

    @property
    def id_file(self) -> Path:
        """What tells this run from another of its name; see `origin`."""
        return self.path / _ID

    @property
    def origin(self) -> str:
        """ID HOST:PATH, as it is stored on a shared server. The id tells this run from another of its name; it is made
        when it is first asked for, and moves and ends with the folder."""
        file = self.id_file
        if not file.exists():
            write_atomic(file, uuid.uuid4().hex)
        return f"{file.read_text()} {self.place}"

    def owns(self, origin: str | None) -> bool:
        """Whether a run on a shared server belongs to this folder, by its id. A run without an origin had its roles
        started one by one, with the configuration in this folder."""
        if origin is None:
            return self.config_file.exists()
        file = self.id_file
        return file.exists() and origin.partition(" ")[0] == file.read_text()

    def locked(self) -> AbstractContextManager[None]:
        """Hold the run for this process, for the length of the block. Raises ConfigError if another one does."""
        busy = ConfigError(
            f"another `async-grpo run` is at work in {self.path}. Wait for it, stop it, or give this run another name "
            "(-o name=...)"
        )
        return locked(self.path / _LOCK, busy)

    def has_live_process(self) -> bool:
        """Whether a process of this machine is at work here: `async-grpo run`, or a role started on its own."""
        return any(map(is_locked, self.lock_files()))

    def lock_files(self) -> list[Path]:
        """The lock files of this machine's processes."""
        return [self.path / _LOCK, *(self.path / "roles").glob("*.lock")]

    def register_role(self, role: str) -> None:
        """Hold the role's lock and record its start, for a role that was started on its own."""
        self.lock_role(role)
        record_start(self.path / "roles" / f"{role}.jsonl")

    def count_restarts(self) -> dict[str, int]:
        """Restarts of the roles that were started one by one: of the trainer, and of the servers that had any."""
        counts = {file.stem: restarts(file) for file in self._histories()}
        trainer = counts.pop(FIRST_TRAINER, 0)
        return {"trainer": trainer, **{role: count for role, count in counts.items() if count}}

    def find_role_failure(self) -> str:
        """Why a role has failed without which the run cannot go on: a node of the trainer, or the last of the rollout
        servers. "" if none has."""
        failures: dict[bool, list[str]] = {True: [], False: []}
        for file in self._histories():
            at_work = is_locked(file.with_suffix(".lock"))
            failures[file.stem.startswith("trainer-")].append("" if at_work else failure(file))
        servers = failures[False]
        return next(filter(None, failures[True]), "") or (servers[-1] if servers and all(servers) else "")

    def _histories(self) -> list[Path]:
        return sorted((self.path / "roles").glob("*.jsonl"))

    def lock_role(self, role: str) -> None:
        """Lock a file for a role that was started on its own, until this process and the program that replaces it have
        ended. Of two processes that have the role, the first holds the lock."""
        (self.path / "roles").mkdir(exist_ok=True)
        file = os.open(self.path / "roles" / f"{role}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try_lock(file)
        os.set_inheritable(file, True)

    def log(self, role: str) -> Path:
        """The file for standard output and errors of a role."""
        return self.path / "logs" / f"{role}.log"

    def read_config(self) -> RunConfig:
        """Read config.yaml, which an earlier release may have written. Raises ConfigError if this one refuses it."""
        return load(self.path)

    def read_state(self) -> RunState:
        """The state so far, or a new one."""
        if not (self.path / _STATE).exists():
            return RunState()
        return RunState(**json.loads((self.path / _STATE).read_text()))

    def write_state(self, state: RunState) -> None:
        """Write run.json, whole or not at all."""
        write_atomic(self.path / _STATE, json.dumps(asdict(state), indent=2) + "\n")


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder exists or can be made, and is writable."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"runs_dir and name make the run's folder {folder}, but {existing} is a file. Set runs_dir to a folder (-o "
            "runs_dir=...), or move that file away"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"runs_dir and name make the run's folder {folder}, but {existing} cannot be written to by this user. Set "
            "runs_dir to a folder that can (-o runs_dir=...)"
        )


def open_run(config: RunConfig, *, fresh: bool = False) -> RunFolder:
    """Make the folder of a run, or take up the one that is there; `fresh` removes that first.

    Raises ConfigError if the folder holds another experiment, or if it cannot be removed because another process is at
    work in it or it is not the folder of a run.
    """
    folder = RunFolder(config.run_dir.absolute())
    if fresh and folder.path.exists():
        remove_run(folder)
    if folder.config_file.exists():
        _check_same_experiment(folder, config)
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def write_config(folder: RunFolder, config: RunConfig, *, for_roles: RunConfig) -> None:
    """Write config.yaml and roles.yaml; a configuration never contains secrets."""
    write_atomic(folder.config_file, dump(config))
    write_atomic(folder.roles_file, dump(for_roles))


def write_role_config(folder: RunFolder, role: str, config: RunConfig) -> Path:
    """Write the configuration that one role alone reads; returns the file."""
    file = folder.roles_file_of(role)
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(file, dump(config))


def run_name(base: str, overrides: Iterable[str]) -> str:
    """The name of a run with overrides, so that each experiment has its own folder.

    Equal values give equal names, however they are spelt. A name that is too long is cut, and ends in a digest of the
    whole name, so that two experiments never get one folder.

    >>> run_name("quickstart", ["max_staleness=0", "trainer.optimizer.lr=0.0001"])
    'quickstart-max_staleness.0-lr.1e-4'
    """
    values: dict[str, str] = {}  # of a key that is given twice, the last counts
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
    """Dotted keys whose values differ between two resolved configurations, without the keys of a machine.

    >>> changed_keys({"seed": 1, "redis": {"url": "a"}}, {"seed": 2, "redis": {"url": "b"}})
    ['seed']
    """
    return differing_keys(before, after, ignored=_FREE_KEYS)


def _spell_value(text: str) -> str:
    """The value of an override as part of a name: one spelling for equal values, and a digest for one that a file name
    cannot hold.

    >>> [_spell_value(text) for text in ("1e-4", "0.0001", "1.0E-4", "0.5", "8", "8.0", "True", "a/b")]
    ['1e-4', '1e-4', '1e-4', '0.5', '8', '8', 'true', 'c14cddc0']
    """
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # ValueError: a date that is none
        value = text
    if isinstance(value, str):
        try:
            value = float(value)  # YAML 1.1 takes 1e-4, which has no point, for a text; the configuration does not
        except ValueError:
            spelt = value
    if isinstance(value, float):
        spelt = _spell_number(value)
    elif not isinstance(value, str):
        spelt = json.dumps(value, sort_keys=True, default=str)
    return spelt if _SAFE_VALUE.match(spelt) else short_digest(spelt)


def _spell_number(value: float) -> str:
    """The shorter of 0.0001 and 1e-4; a whole number without a point, as an integer is spelt."""
    if value.is_integer() and abs(value) < _MOST_DIGITS:
        return str(int(value))
    plain = repr(value)
    if not math.isfinite(value):
        return plain
    for digits in range(17):  # the fewest that give the same number
        mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
        if float(f"{mantissa}e{exponent}") == value:
            break
    scientific = f"{mantissa}e{int(exponent)}"
    if "e" in plain or len(scientific) < len(plain):
        return scientific
    return plain


def remove_run(folder: RunFolder) -> None:
    """Remove the folder of a run. Raises ConfigError if no run made it, or if a process is at work in it."""
    check_is_run(folder)
    with folder.locked():
        shutil.rmtree(folder.path)


def check_is_run(folder: RunFolder) -> None:
    """Raise ConfigError for a folder with files that no run made: `--fresh` must not delete them."""
    known = folder.config_file.exists() or (folder.path / _LOCK).exists()
    if not known and folder.path.exists() and any(folder.path.iterdir()):
        raise ConfigError(f"{folder.path} is not a run (it has no config.yaml); it is not removed. Choose another name")


def _check_same_experiment(folder: RunFolder, config: RunConfig) -> None:
    before = _recorded_values(folder)
    changed = [key for key in changed_keys(before, config.model_dump(mode="json")) if key != "steps"]
    if changed:
        raise ConfigError(
            f"{folder.path} holds a run with other values of {', '.join(changed)}. Resuming it would mix two "
            "experiments. Give this one a name (-o name=...), or start over with `async-grpo run` and --fresh, which "
            "deletes the old one. To go on from its weights with other values: -o name=... "
            f"-o model.path={folder.path / 'checkpoints' / 'hf'}"
        )


def _recorded_values(folder: RunFolder) -> Any:
    """The values of config.yaml, with keys that have been added since at their defaults; the file as it is if this
    release refuses it."""
    try:
        return folder.read_config().model_dump(mode="json")
    except ConfigError:
        return yaml.safe_load(folder.config_file.read_text())


def find_checkpoint(run_dir: Path, version: int | None) -> tuple[RunConfig, Path]:
    """The configuration of a run and the folder of a checkpoint, the newest if `version` is None.

    Raises ConfigError if `run_dir` is not the folder of a run or has no such checkpoint.
    """
    folder = RunFolder(run_dir)
    if not folder.config_file.is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run (it has no {folder.config_file.name}). Check the name")
    checkpoints = run_dir / "checkpoints"
    versions = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal())
    if not versions:
        raise ConfigError(
            f"{run_dir} has no checkpoint yet. The first one comes after trainer.checkpoint.every_steps steps, or when "
            "the run ends"
        )
    wanted = versions[-1] if version is None else version
    if wanted not in versions:
        raise ConfigError(
            f"{run_dir} has no checkpoint of version {wanted}, only of {', '.join(map(str, versions))}. Older ones are "
            "deleted; see trainer.checkpoint.keep and keep_best"
        )
    return folder.read_config(), checkpoints / f"{wanted:08d}"


def choose_checkpoint(run_dir: Path, checkpoint: str) -> int:
    """Let the run in `run_dir` resume from `checkpoint`, a version or its folder; returns the version.

    The trainer then resumes from it even if the buffer has forgotten what came after it. Raises ConfigError if there is
    no such checkpoint or a process is at work in the folder, CheckpointDamaged if it does not hold what was written.
    """
    name = Path(checkpoint).name
    if not name.isdecimal():
        raise ConfigError(f"--from {checkpoint} is no version of a checkpoint. Give its number, such as --from 80")
    _, folder = find_checkpoint(run_dir, int(name))
    manifest = read_manifest(folder)
    wrong = find_changed_files(folder, manifest, manifest.files)
    if wrong:
        raise damaged_checkpoint(folder, f"{', '.join(wrong)} does not hold what was written")
    with RunFolder(run_dir).locked():
        write_atomic(folder.parent / CHOSEN, f"{manifest.version}\n", synced=True)
        write_atomic(folder.parent / LATEST, f"{manifest.version}\n", synced=True)
    return manifest.version


def find_run(config: Path | None, overrides: Sequence[str], run_dir: Path | None) -> RunConfig:
    """The configuration of a started run, with `redis.url` set and short timeouts.

    Raises ConfigError if no run or two runs are named, or if the named run was not started or does not run any more.
    """
    if (folder := find_named_folder(config, overrides, run_dir)) is not None:
        found = _config_in(folder)
    elif config is None:
        raise ConfigError("which run? Give its folder, such as runs/NAME, or the CONFIG (and -o) it was started with")
    else:
        asked = load(config, overrides)
        asked = asked.model_copy(update={"name": run_name(asked.name, overrides)})
        found = asked if asked.redis.url is not None else _config_in(RunFolder(asked.run_dir))
    redis = found.redis.model_copy(update={"timeout_s": min(found.redis.timeout_s, PATIENCE_S)})
    return found.model_copy(update={"redis": redis})


def find_named_folder(config: Path | None, overrides: Sequence[str], run_dir: Path | None) -> RunFolder | None:
    """The folder of a run, given in place of CONFIG or as --run-dir; None if a configuration file is given, or nothing.

    Raises ConfigError if the run is named twice.
    """
    if run_dir is None and config is not None and config.is_dir():
        config, run_dir = None, config
    if run_dir is None:
        return None
    if config is not None or overrides:
        raise ConfigError(
            "--run-dir names the run already, and so does a folder in place of CONFIG. Leave out CONFIG and -o, or the "
            "folder"
        )
    return RunFolder(run_dir)


def _config_in(folder: RunFolder) -> RunConfig:
    if not folder.roles_file.is_file():
        raise ConfigError(
            f"{folder.path} holds no run that was started (it has no {folder.roles_file.name}). Check the name: "
            "overrides (-o) are part of it. A run on a server of its own is found by its CONFIG with -o redis.url=..."
        )
    config = load(folder.roles_file)
    if folder.read_config().redis.url is None:
        _check_embedded(config)
    return config


def _check_embedded(config: RunConfig) -> None:
    """Raise ConfigError if the embedded server is gone; it lives as long as the run does and has no password."""
    socket = Path(unquote(urlsplit(config.redis.url or "").path))
    if not socket.is_socket():
        raise ConfigError(
            f"the run {config.name} is not running: its embedded server is gone with it ({socket}). "
            "The command that started it resumes it, and what the buffer held is there again"
        )
    os.environ.pop(PASSWORD_VARIABLE, None)
