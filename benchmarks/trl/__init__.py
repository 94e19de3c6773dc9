"""Comparison with TRL's synchronous `GRPOTrainer` on a CPU: `python -m benchmarks.trl.compare`."""
