"""Held-out prompts: completed and graded, for the milestones of a run and for `async-grpo eval`."""
