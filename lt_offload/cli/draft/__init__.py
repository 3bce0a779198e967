"""Recipes that are made by planning: for which model, trained in which way, with which comment at the top."""
