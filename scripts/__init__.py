"""Programs that measure and check; run each from the repository as ``python -m scripts.NAME``."""
