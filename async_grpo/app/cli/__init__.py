"""The typer commands of `async-grpo`."""
