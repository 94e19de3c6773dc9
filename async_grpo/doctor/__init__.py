"""What is installed, what is missing, what to type."""
