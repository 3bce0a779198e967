"""Programs that measure speed and write ``results/*.json``; run as ``python -m scripts.bench.NAME``."""
