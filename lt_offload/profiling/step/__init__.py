"""A step of training, as it is seen from between the blocks: what they are called with, and what happens outside."""
