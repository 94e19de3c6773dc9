"""Tiny Qwen2 checkpoints that a run makes itself, deterministically and on the CPU.

- `qwen2`          the network, initialised by a seed
- `arithmetic`     what `trainer.warmup` teaches the quickstart's policy: vocabulary, demonstrations, marks
- `random_qwen2`   a policy that learns nothing, with a tokenizer of the run's prompts; for tests of the machinery
"""
