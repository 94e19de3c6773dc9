"""The rollout server process.

    python -m rollout_server.main --config runs/NAME/config.yaml --model MODEL_DIR --name rollout-0

Exit codes:

    0    the run has ended and its final evaluation is on the board, or SIGTERM or SIGINT has stopped the server
    1    any fault that is not listed here
    3    the engine died more than rollout.engine_restarts times
    78   fault of the configuration, the data or the installation; the supervisor does not restart the server

If the engine dies or the server is stopped, groups in flight are saved and given back. The last line of the log has the
reason.
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

EXIT_FAULT = 1
EXIT_ENGINE = 3
STOP_FRACTION = 0.8
"""Fraction of launch.stop_timeout_s after which the process exits, even if a part of it hangs."""

log = structlog.get_logger()


def main() -> None:
    """Parse the command line, serve, and exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, type=Path, help="a resolved run configuration")
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face checkpoint folder")
    parser.add_argument("--name", required=True, help="unique among the rollout servers of the run")
    arguments = parser.parse_args()
    configure_logging(arguments.name)
    structlog.contextvars.bind_contextvars(role=arguments.name)
    bind_process(role="rollout", replica=arguments.name)

    code = serve_run(arguments.config, arguments.model, arguments.name)
    if code == 0:
        record_end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # sys.exit would wait for threads of the engine, which may never end


def serve_run(config_file: Path, model: Path, name: str) -> int:
    """Serve the run of the configuration file; returns the exit code."""
    try:
        config = load(config_file)
        bind_process(run=config.name)
        import_engine(config)
        uvloop.run(_serve_until_stopped(config, model, name))
    except Exception as error:
        return _report_error(root_cause(error))
    return 0


async def _serve_until_stopped(config: RunConfig, model: Path, name: str) -> None:
    serving = asyncio.current_task()
    assert serving is not None
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            log.info("stopping: saving groups in flight")
            _exit_at_deadline(STOP_FRACTION * config.launch.stop_timeout_s)
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
    # Not at the top: it imports the engine, which takes long. Wrong arguments are reported before.
    from rollout_server.assembly import open_server

    for restarts_left in range(config.rollout.engine_restarts, -1, -1):
        try:
            async with open_server(config, model, name) as server:
                if server is None:
                    log.info("the run is over: nothing to do")
                else:
                    with watched_loop(config.max_sample_s, _exit_blocked):
                        await server.serve()
            _exit_at_deadline(STOP_FRACTION * config.launch.stop_timeout_s)
            return
        except Exception as error:
            cause = root_cause(error)
            if restarts_left == 0 or not isinstance(cause, EngineError):
                raise
            log.warning(
                "the engine died and is started again",
                error=redact_secrets(str(cause)),
                restarts_left=restarts_left,
            )


def _exit_blocked(blocker: str) -> None:
    """Exit although the event loop is blocked. The leases expire, and other servers continue the groups."""
    report_fatal(
        RoleFailed(
            f"the event loop of this process is blocked by {blocker}, so nothing else can run. Make the blocking code "
            "asynchronous, or run it with asyncio.to_thread"
        )
    )
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def _exit_at_deadline(deadline_s: float) -> None:
    """Exit after `deadline_s` seconds, in case the engine does not close or a workflow cannot be cancelled.

    Groups in flight are saved long before.
    """
    timer = threading.Timer(deadline_s, os._exit, [0])
    timer.daemon = True
    timer.start()


def _report_error(error: BaseException) -> int:
    """Print the error, in one line if it is one of ours, otherwise with its traceback. Returns the exit code."""
    if not isinstance(error, AsyncGrpoError):
        if is_json():
            log.error("unexpected error", exc_info=error)
        else:
            traceback.print_exception(error)
    report_fatal(error)
    if isinstance(error, CONFIG_FAULTS):
        return EXIT_CONFIG
    if isinstance(error, EngineError):
        return EXIT_ENGINE
    return EXIT_FAULT


# A process that vLLM has just spawned. If its owner dies now, it would wait for it for minutes.
if __name__ == "__mp_main__":
    exit_with_owner()
if __name__ == "__main__":
    main()
