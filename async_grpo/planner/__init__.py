"""What a run will need, worked out before it starts: pure functions of the configuration and the model's shape."""
