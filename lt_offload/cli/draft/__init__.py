"""Recipes that are made by planning: the model, the way to train it, the comment at the top."""
