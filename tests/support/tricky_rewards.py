"""Reward functions that do what the completion says: everything that can go wrong in one."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

HANGS_S = 600.0
_calls = 0


def tricky(completion: str, answer: str, *, metadata: Mapping[str, str]) -> object:
    """1 if the completion is the answer; `metadata["file"]` gets the number of a process that is left behind, or
    appears once the function hangs."""
    deed = _DEEDS.get(completion)
    if deed is not None:
        return deed()
    match completion:
        case "fork":
            _leave_child(metadata["file"])
        case "daemon":
            _leave_child(metadata["file"], leaves_session=True)
        case "announce and hang":
            Path(metadata["file"]).touch()
            time.sleep(HANGS_S)
        case "thread":
            threading.Thread(target=time.sleep, args=(HANGS_S,)).start()
        case "fork and come back":
            os.fork()
        case "family that eats memory":
            _leave_child(metadata["file"], eats=True)
            time.sleep(HANGS_S)
    return float(completion == answer)


def counting(completion: str, answer: str) -> float:
    """How often it was called in this process."""
    global _calls
    _calls += 1
    return _calls


def sees(completion: str, answer: str) -> float:
    """1 if the environment variable that the completion names is there."""
    return float(completion in os.environ)


def reads(completion: str, answer: str) -> float:
    """1 if the file that the completion names can be read."""
    try:
        Path(completion).read_bytes()
    except PermissionError:
        return 0.0
    return 1.0


async def waits(completion: str, answer: str, prompt: str) -> float:
    """Asynchronous, and looks at the prompt."""
    await asyncio.sleep(0.001)
    return float(prompt == answer)


class Remembers:
    """A class of reward functions; made once in every process."""

    def __init__(self) -> None:
        self.seen = 0

    async def __call__(self, completion: str, answer: str, **extras: object) -> int:
        self.seen += 1
        return self.seen


def wants_three(completion: str, answer: str, reference: str) -> float:
    """Cannot be called with two."""
    return 0.0


def says_yes(completion: str, answer: str) -> str:
    """Returns no number."""
    return "yes"


def mistyped(completion: str, answer: str) -> float:
    """A mistake that shows only when it is called."""
    return complition == answer  # type: ignore[name-defined]  # noqa: F821


def hangs(completion: str, answer: str) -> float:
    """Never comes back."""
    time.sleep(HANGS_S)
    return 0.0


def _hang_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(HANGS_S)


def _raise() -> None:
    raise RuntimeError("cannot judge this")


def _eat() -> None:
    eaten = []
    while True:
        eaten.append(b"x" * (8 << 20))


def _flood() -> float:
    # In pieces: as one string and its bytes, 100 MB would be a question of the memory limit, not of printing.
    for stream in (sys.stdout, sys.stderr):
        for _ in range(50):
            stream.write("x" * (1 << 20))
    return 1.0


def _scribble() -> None:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff" * 64)
        except OSError:
            continue
    time.sleep(HANGS_S)


def _close_everything() -> None:
    os.closerange(3, 256)
    time.sleep(HANGS_S)


def _leave_child(file: str, *, leaves_session: bool = False, eats: bool = False) -> None:
    child = os.fork()
    if child == 0:
        if leaves_session:
            os.setsid()
            if os.fork() > 0:
                os._exit(0)
        Path(file).write_text(str(os.getpid()))
        if eats:
            _eat()
        time.sleep(HANGS_S)
        os._exit(0)
    if leaves_session:
        os.waitpid(child, 0)
    until_s = time.monotonic() + 30
    while not (Path(file).exists() and Path(file).read_text()) and time.monotonic() < until_s:
        time.sleep(0.005)


_DEEDS = {
    "hang": lambda: time.sleep(HANGS_S),
    "hang and ignore SIGTERM": _hang_deaf,
    "raise": _raise,
    "exit": lambda: sys.exit(3),
    "crash": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "eat memory": _eat,
    "MemoryError": lambda: bytearray(1 << 60),
    "print 100 MB": _flood,
    "scribble": _scribble,
    "close everything": _close_everything,
    "nan": lambda: float("nan"),
    "infinite": lambda: float("inf"),
    "none": lambda: None,
    "text": lambda: "1",
    "array": lambda: import_module("numpy").ones(3),
    "huge": lambda: 10**400,
    "too large": lambda: 1e30,
    "numpy": lambda: import_module("numpy").float32(0.5),
    "bool": lambda: True,
}


def answers(completion: str, answer: str) -> float:
    """Always right: only its extraction does what the completion says."""
    return 1.0


def extract(completion: str) -> object:
    """The completion in capital letters, or something that goes wrong."""
    match completion:
        case "raise":
            raise ValueError("no")
        case "number":
            return 3
        case "crash":
            os._exit(7)
        case "nothing":
            return None
        case "long":
            return "x" * 1001
        case "hang":
            time.sleep(HANGS_S)
    return completion.upper()


answers.extract = extract
