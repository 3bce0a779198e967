"""Plans from settings alone, without weights: what verbs ask the planner, and with which profile."""
