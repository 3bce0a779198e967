"""The way of gradients: where they arrive, how they are added up, clipped, and used by the optimizer."""
