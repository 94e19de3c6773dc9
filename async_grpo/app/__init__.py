"""The application: commands, what they start on this machine, and what they show of it."""
