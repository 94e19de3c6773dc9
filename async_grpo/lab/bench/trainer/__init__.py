"""The bench of a training step, beside plain PyTorch."""
