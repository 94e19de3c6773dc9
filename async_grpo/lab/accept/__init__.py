"""`async-grpo accept`: checks a new device before the first run and writes a report that users can send back."""
