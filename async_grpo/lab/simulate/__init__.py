"""A run, predicted: discrete events around the replay buffer's own decisions."""
