"""`async-grpo prepare`: turns published data files into a prepared folder."""
