"""Which models of the installed transformers train with the package as they are: ``python -m scripts.breadth``."""
