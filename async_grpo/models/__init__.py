"""First policies that a run can make for itself, and the shapes of models."""
