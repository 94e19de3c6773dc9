"""Import vLLM once, for the rollout server and its engine process on CPU.

    rollout server (imports vLLM) --fork, at once--> fork server (waits) --fork, at `VllmEngine.start`--> EngineCore

vLLM on a CPU spawns its engine process: a new interpreter that imports everything again, which takes about 5 s of a
core. Here multiprocessing's own fork server forks the engine process instead. The fork server is forked before the
rollout server opens a socket, runs an event loop or starts a thread, and it computes nothing. So a fork never copies a
lock, connection or OpenMP thread pool that is in use. A restarted engine gets a new process from it.
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

_PRELOADED_MODULES = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
_ENGINE_STARTER_MODULE = "vllm.v1.engine.utils"
"""Module that starts engine processes, with the context that its `get_mp_context` returns."""


def import_and_fork(config: VllmConfig) -> None:
    """Import vLLM, start the fork server, and make vLLM use it. Only for a CPU engine with one worker, on Linux.

    Call while this process has no thread except the main one. Does nothing if vLLM is missing: `VllmEngine.start`
    raises the error.
    """
    # With several workers, each is a process that the engine process spawns, so there is less to gain.
    if config.platform != "cpu" or config.tensor_parallel != 1 or not config.multiprocessing or sys.platform != "linux":
        return
    set_environment(config)
    with contextlib.suppress(ImportError):
        with uncollected():
            for module in _PRELOADED_MODULES:
                import_module(module)

        # Start the resource tracker first: `forkserver.ensure_running` would start it through the replaced function.
        resource_tracker.ensure_running()
        spawn = util.spawnv_passfds
        util.spawnv_passfds = _fork_into_server
        try:
            forkserver.ensure_running()
        finally:
            util.spawnv_passfds = spawn

        engine_starter: Any = import_module(_ENGINE_STARTER_MODULE)
        engine_starter.get_mp_context = _ForkServerContext


def _fork_into_server(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Fork this process, with its imports, into the fork server. Replaces `spawnv_passfds`, which runs a new Python."""
    if pid := os.fork():
        return pid
    try:
        with contextlib.suppress(ImportError):
            import setproctitle  # a dependency of vLLM

            setproctitle.setproctitle("VLLM::ForkServer")

        # As a new interpreter would not have them: an open copy would keep sockets and pipes of the server alive.
        for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2 and descriptor not in passfds:
                with contextlib.suppress(OSError):  # the descriptor of the listing itself is already closed
                    os.close(descriptor)

        listener_fd, alive_fd = passfds  # the order in which CPython's `ensure_running` passes them
        forkserver.main(listener_fd, alive_fd, [])
    finally:
        os._exit(0)  # never return into the code of the rollout server, of which this process is a copy


class _EngineProcess(ForkServerProcess):
    """An engine process with the environment that the rollout server has when it calls `start`.

    By itself, it would have that of the fork server, which was copied earlier.
    """

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _ForkServerContext(ForkServerContext):
    Process = _EngineProcess
