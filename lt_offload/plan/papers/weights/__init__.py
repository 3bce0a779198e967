"""Weight offloading (2022): which weights travel, greedily or layer by layer."""
