"""Comparisons with other systems; each is a command, and none is part of the distribution."""
