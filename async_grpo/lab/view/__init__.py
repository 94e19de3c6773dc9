"""`async-grpo view`: a local web page of runs."""
