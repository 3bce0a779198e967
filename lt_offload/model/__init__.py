"""A model as blocks: where they begin, what they are called with, what running them changes."""
