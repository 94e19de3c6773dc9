"""Checkpoints that a run resumes from exactly, written in the background, and their conversion."""
