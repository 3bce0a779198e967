"""The contract: what profiling, planning and execution hand to each other. Frozen data, JSON both ways, no torch."""
