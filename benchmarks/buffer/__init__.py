"""The bench of the replay buffer, beside a plain loop on the same server."""
