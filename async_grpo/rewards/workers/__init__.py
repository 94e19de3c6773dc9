"""Verifier processes that can be limited and killed: their supervisor, the pool's client of it, and the worker."""
