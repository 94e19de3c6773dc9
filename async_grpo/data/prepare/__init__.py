"""`async-grpo prepare`: from published data files to a prepared folder."""
