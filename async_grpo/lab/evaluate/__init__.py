"""`async-grpo eval`: a policy graded on held-out prompts."""
