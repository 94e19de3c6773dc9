"""What a rival and its far end say to each other, one line each."""

from __future__ import annotations

GO = b"go\n"
"""The next block is on its way."""
DONE = b"done\n"
"""All of it is here."""
WAIT_S = 120.0
"""For whatever one end waits for: a bench that takes longer is broken."""
