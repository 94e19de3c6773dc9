"""Measurements of one rollout server's parts on this machine. `async-grpo bench` shows their figures."""
