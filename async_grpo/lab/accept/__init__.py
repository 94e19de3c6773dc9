"""`async-grpo accept`: the checks of the first hour on a device, with a report that can be sent back."""
