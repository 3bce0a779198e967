"""Plans from settings alone, without weights: the verbs' profiles and requests to the planner."""
