"""Checkpoints that are complete or absent, and from which training goes on as if it had never stopped."""
