"""The bench of the whole loop: what asynchrony gains."""
