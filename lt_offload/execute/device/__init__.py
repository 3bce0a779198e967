"""Devices for blocks: an arena, lanes beside the computations, events that link them; emulated, or a CUDA GPU."""
