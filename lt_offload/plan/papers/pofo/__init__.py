"""POFO (NeurIPS 2021): weights stay, activations are offloaded or computed again."""
