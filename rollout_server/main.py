"""The rollout server process.

    python -m rollout_server.main --config runs/NAME/config.yaml --model MODEL_DIR --name rollout-0

It ends with code 0 when the run has ended and its final evaluation is on the board, and after SIGTERM or SIGINT, once
work in flight is stored and given back. If the engine dies, its groups are stored and given back, and the engine is
started again, at most rollout.engine_restarts times; then the code is 3. A fault of the configuration, the data or the
installation ends it with 78, and the supervisor does not start it again. Any other fault ends it with 1. The last line
of the log says why.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import structlog
import uvloop

from async_grpo.config import RunConfig, load
from async_grpo.errors import CONFIG_FAULTS, EXIT_CONFIG, AsyncGrpoError, EngineError, RoleFailed
from async_grpo.telemetry.logging import bind_process, configure_logging, is_json, redact_secrets, report_fatal
from async_grpo.telemetry.role_history import record_end
from async_grpo.utils.aio import root_cause, watched_loop
from async_grpo.utils.processes import exit_with_owner
from rollout_server.engines import import_engine

EXIT_FAULT, EXIT_ENGINE = 1, 3
STOP_SHARE = 0.8
"""Share of launch.stop_timeout_s after which the process ends, even if something still hangs."""

log = structlog.get_logger()


def main() -> None:
    """Parse the command line and serve; never returns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, type=Path, help="a resolved run configuration")
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face checkpoint folder")
    parser.add_argument("--name", required=True, help="unique among the rollout servers of the run")
    arguments = parser.parse_args()
    configure_logging(arguments.name)
    structlog.contextvars.bind_contextvars(role=arguments.name)
    bind_process(role="rollout", replica=arguments.name)
    code = run(arguments.config, arguments.model, arguments.name)
    if code == 0:
        record_end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the engine that have not ended must not hold the process


def run(config_file: Path, model: Path, name: str) -> int:
    """Serve the run of the configuration file; returns the exit code."""
    try:
        config = load(config_file)
        bind_process(run=config.name)
        import_engine(config)
        uvloop.run(_serve_until_stopped(config, model, name))
    except Exception as error:
        return _explain(root_cause(error))
    return 0


async def _serve_until_stopped(config: RunConfig, model: Path, name: str) -> None:
    serving = asyncio.current_task()
    assert serving is not None
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            log.info("stopping: storing work in flight")
            _exit_at_deadline(STOP_SHARE * config.launch.stop_timeout_s)
            serving.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await _serve(config, model, name)
    except asyncio.CancelledError:
        if not stopping:
            raise
    log.info("stopped")


async def _serve(config: RunConfig, model: Path, name: str) -> None:
    from rollout_server.assembly import open_server  # the engine and its dependencies, after the arguments are checked

    for left in range(config.rollout.engine_restarts, -1, -1):
        try:
            async with open_server(config, model, name) as server:
                if server is None:
                    log.info("the run is over: nothing to do")
                else:
                    with watched_loop(config.longest_sample_s, _give_up):
                        await server.serve()
            _exit_at_deadline(STOP_SHARE * config.launch.stop_timeout_s)
            return
        except Exception as error:
            cause = root_cause(error)
            if left == 0 or not isinstance(cause, EngineError):
                raise
            log.warning("the engine died and is started again", error=redact_secrets(str(cause)), restarts_left=left)


def _give_up(holder: str) -> None:
    """End the process although the event loop is blocked. The leases run out, and other servers go on."""
    said = f"nothing happens in this process any more, the event loop is blocked by {holder}. Make what blocks there "
    report_fatal(RoleFailed(f"{said}asynchronous, or run it by asyncio.to_thread"))
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def _exit_at_deadline(deadline_s: float) -> None:
    """End the process after `deadline_s` seconds, in case the engine does not close or a workflow cannot be cancelled.
    Work in flight is stored long before."""
    timer = threading.Timer(deadline_s, os._exit, [0])
    timer.daemon = True
    timer.start()


def _explain(error: BaseException) -> int:
    """Print the error, in one line if it was raised on purpose, else with its traceback; returns the exit code."""
    if not isinstance(error, AsyncGrpoError):
        log.error("not expected", exc_info=error) if is_json() else traceback.print_exception(error)
    report_fatal(error)
    if isinstance(error, CONFIG_FAULTS):
        return EXIT_CONFIG
    return EXIT_ENGINE if isinstance(error, EngineError) else EXIT_FAULT


if __name__ == "__mp_main__":  # a process of vLLM, just spawned, which waits minutes for an owner that has died
    exit_with_owner()
if __name__ == "__main__":
    main()
