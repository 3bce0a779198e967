"""What is made of the shipped recipes."""
