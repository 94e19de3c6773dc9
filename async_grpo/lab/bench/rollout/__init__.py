"""The bench of a rollout server, compared with bare vLLM."""
