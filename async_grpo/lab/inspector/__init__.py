"""`async-grpo buffer`: what a person sees of a run's buffer.

- `views`    overviews, lists of groups and records to print
- `export`   the wait for a drained buffer, stored groups written to a file, records as JSON
"""
