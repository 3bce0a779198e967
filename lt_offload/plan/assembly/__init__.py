"""From decisions to a plan: tensors that travel together, their places in the arena, ops and what they wait for."""
