"""Measurements of one training step on this machine. `async-grpo bench trainer` shows their figures."""
