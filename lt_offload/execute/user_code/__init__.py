"""Users' code beside the engine: its view of a model that is trained by a plan, and what it may do meanwhile."""
