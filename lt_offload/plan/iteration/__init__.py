"""One iteration before it is a plan: its decisions, its computations, and the memory that they take."""
