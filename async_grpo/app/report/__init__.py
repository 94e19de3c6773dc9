"""What people read of a run: the live view, report.md and its plots."""
