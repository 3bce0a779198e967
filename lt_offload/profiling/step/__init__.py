"""A step of training, observed between the blocks: their arguments, and the computations outside them."""
