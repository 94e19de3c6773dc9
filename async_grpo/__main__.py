"""`python -m async_grpo`: the `async-grpo` command."""

from __future__ import annotations

from async_grpo.app.cli.main import app

if __name__ == "__main__":
    app(prog_name="async-grpo")
