"""One import of vLLM for the rollout server and its engine process.

    rollout server: imports vLLM --fork--> fork server, which waits --fork at `VllmEngine.start`--> EngineCore

vLLM on a CPU spawns its engine process: a new interpreter that imports everything again, which takes about 5 s of a
core. Here the engine process is forked instead, by multiprocessing's own fork server. That server is forked before the
rollout server opens a socket, runs an event loop or starts a thread, and computes nothing, so that no lock, connection
or thread pool of OpenMP is copied in use. An engine that is started again gets a fresh process from it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from async_grpo.config.rollout import VllmConfig
from async_grpo.utils.processes import uncollected
from rollout_server.engines.vllm.platform import set_environment

_MODULES = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
_STARTS_ENGINES = "vllm.v1.engine.utils"


def import_and_fork(config: VllmConfig) -> None:
    """Import vLLM, start the fork server, and have vLLM use it: for a CPU engine of one process, on Linux.

    Call it while this process has no thread of its own. Does nothing where vLLM is missing: `VllmEngine.start` says so.
    """
    if config.platform != "cpu" or config.tensor_parallel != 1 or not config.multiprocessing or sys.platform != "linux":
        return
    set_environment(config)
    with contextlib.suppress(ImportError):
        with uncollected():
            for module in _MODULES:
                import_module(module)
        resource_tracker.ensure_running()  # a process that is spawned as ever
        spawn, util.spawnv_passfds = util.spawnv_passfds, _fork_server
        try:
            forkserver.ensure_running()
        finally:
            util.spawnv_passfds = spawn
        engines: Any = import_module(_STARTS_ENGINES)
        engines.get_mp_context = _Context


def _fork_server(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Stands in for `spawnv_passfds`: the fork server goes on from here, with what this process has imported."""
    if pid := os.fork():
        return pid
    try:
        with contextlib.suppress(ImportError):
            import setproctitle  # comes with vLLM

            setproctitle.setproctitle("VLLM::ForkServer")
        for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2 and descriptor not in passfds:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(descriptor)
        listener, alive = passfds
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


class _EngineProcess(ForkServerProcess):
    """A process that gets its parent's environment at the time of its start, as a spawned process would."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _EngineProcess
