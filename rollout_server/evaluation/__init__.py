"""Completion and grading of held-out prompts, for the milestones of a run and for `async-grpo eval`."""
