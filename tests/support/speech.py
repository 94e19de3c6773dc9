"""JSON lines on a standard output that is this process's alone."""

from __future__ import annotations

import json
import os
from typing import Any


class Speech:
    """What children, and logs, write to standard output goes to standard error from now on."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, content: dict[str, Any]) -> None:
        self._output.write(json.dumps(content) + "\n")
        self._output.flush()
