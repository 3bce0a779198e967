"""From decisions to a plan: tensors that travel together, their places in the arena, ops and their dependencies."""
