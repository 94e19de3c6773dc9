"""The rollout server: `server` has the picture of its parts, `assembly` the order in which they are opened."""
