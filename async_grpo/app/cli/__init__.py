"""The typer commands of `async-grpo`.

While `main` imports them, Ctrl-C ends the process at once: Python would print a traceback of the import.
"""

import signal
import threading

AT_IMPORT = signal.getsignal(signal.SIGINT)
"""The usual handler of Ctrl-C; `main` restores it."""
if AT_IMPORT is signal.default_int_handler and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
