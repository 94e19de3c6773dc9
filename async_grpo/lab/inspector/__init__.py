"""`async-grpo buffer`: inspection of a run's buffer.

- `views`    overviews, lists of groups and records, rendered for the terminal
- `export`   waiting for a drained buffer, stored groups as a file, records as JSON
"""
