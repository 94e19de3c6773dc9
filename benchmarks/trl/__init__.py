"""TRL's synchronous `GRPOTrainer` beside this project, on CPU: `python -m benchmarks.trl.compare`."""
