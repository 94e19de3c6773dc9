"""The application: commands, and what starts, keeps and reports runs. Its commands alone import `async_grpo.lab`."""
