"""What users' code sees of a model that is trained by a plan, and what it may do meanwhile."""
