"""Tiny Qwen2 checkpoints that a run makes itself, deterministically and on the CPU.

- `qwen2`          the network, initialised by a seed
- `arithmetic`     the task that `trainer.warmup` teaches the quickstart's policy: vocabulary, demonstrations, checks
- `random_qwen2`   a random policy with a tokenizer trained on the run's prompts; for tests of the machinery
"""
