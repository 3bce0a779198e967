"""What is run on a GPU (``python -m scripts.gpu``); whether tests notice faults (``python -m scripts.gpu.mutants``)."""
