"""The bench of a rollout server, beside bare vLLM."""
