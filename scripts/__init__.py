"""Programs that measure, compare and check; run in the repository's root as ``python -m scripts.NAME``."""
