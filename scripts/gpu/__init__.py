"""Everything that needs a GPU: ``python -m scripts.gpu``."""
