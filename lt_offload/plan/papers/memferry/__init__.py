"""MemFerry (2024): weights that are copied, or read in host memory by the device itself."""
