"""What plans say about cards: figures that are simulated, and tables of them."""
