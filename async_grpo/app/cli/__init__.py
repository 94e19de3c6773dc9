"""The typer commands of `async-grpo`.

While `main` imports them, Ctrl-C kills the process directly. Python's handler would print a traceback of the import.
"""

import signal
import threading

AT_IMPORT = signal.getsignal(signal.SIGINT)
"""Python's handler of Ctrl-C. `main` restores it after the imports."""
if AT_IMPORT is signal.default_int_handler and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
