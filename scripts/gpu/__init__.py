"""What is run on a GPU (``python -m scripts.gpu``), and whether the tests notice faults (``python -m scripts.gpu.mutants``)."""
